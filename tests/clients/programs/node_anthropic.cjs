// Anthropic's client for Node: messages, streams, tools and counts: `node_anthropic.cjs URL`.
const assert = require("node:assert");
const Anthropic = require("@anthropic-ai/sdk").default;

const tool = {
  name: "play",
  description: "plays a shot",
  input_schema: {
    type: "object",
    properties: { stroke: { enum: ["lob", "drop"] }, spin: { type: "boolean" } },
    required: ["stroke", "spin"],
  },
};
const messages = [{ role: "user", content: "Serve!" }];

async function main(url) {
  const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const asked = { model: "tiny", messages, max_tokens: 60, temperature: 0 };

  const whole = await client.messages.create(asked);
  const stream = client.messages.stream(asked);
  assert.strictEqual(await stream.finalText(), whole.content[0].text);

  const called = { ...asked, tools: [tool], tool_choice: { type: "any" } };
  const answer = await client.messages.stream(called).finalMessage();
  const use = answer.content.find((block) => block.type === "tool_use");
  assert.ok(["lob", "drop"].includes(use.input.stroke), JSON.stringify(use));
  const result = { type: "tool_result", tool_use_id: use.id, content: "point" };
  const turns = [
    ...messages,
    { role: "assistant", content: answer.content },
    { role: "user", content: [result] },
  ];
  const count = await client.messages.countTokens({ model: "tiny", messages: turns, tools: [tool] });
  const last = await client.messages.create({ ...asked, messages: turns, tools: [tool] });
  const usage = last.usage;
  assert.strictEqual(usage.input_tokens + usage.cache_read_input_tokens, count.input_tokens);
}

main(process.argv[2]);
