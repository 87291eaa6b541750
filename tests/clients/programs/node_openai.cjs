// OpenAI's client for Node: chats, tools, structured answers and responses: `node_openai.cjs URL`.
const assert = require("node:assert");
const OpenAI = require("openai").default;

const schema = {
  type: "object",
  properties: { stroke: { enum: ["lob", "drop"] }, spin: { type: "boolean" } },
  required: ["stroke", "spin"],
  additionalProperties: false,
};
const described = { name: "play", description: "plays a shot", parameters: schema, strict: true };
const messages = [{ role: "user", content: "Serve!" }];

function check(text) {
  const shot = JSON.parse(text);
  assert.ok(["lob", "drop"].includes(shot.stroke) && typeof shot.spin === "boolean", text);
}

async function main(url) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const asked = { model: "tiny", messages, max_tokens: 60, temperature: 0 };

  let said = "";
  const stream = await client.chat.completions.create({ ...asked, stream: true });
  for await (const chunk of stream) said += chunk.choices[0]?.delta?.content ?? "";
  const whole = await client.chat.completions.create(asked);
  assert.strictEqual(said, whole.choices[0].message.content);

  // Left free, this model calls again and again, until its tokens are used up.
  const one = { parallel_tool_calls: false };
  const tools = [{ type: "function", function: described }];
  for (const tool_choice of ["required", { type: "function", function: { name: "play" } }]) {
    const answer = client.chat.completions.stream({ ...asked, ...one, tools, tool_choice });
    const [call] = (await answer.finalChatCompletion()).choices[0].message.tool_calls;
    assert.strictEqual(call.function.name, "play");
    check(call.function.arguments);
  }
  const format = { type: "json_schema", json_schema: { name: "shot", schema, strict: true } };
  const parsed = await client.chat.completions.parse({ ...asked, response_format: format });
  check(parsed.choices[0].message.content);

  const events = client.responses.stream({
    model: "tiny",
    input: "Serve!",
    max_output_tokens: 60,
    tools: [{ type: "function", ...described }],
    tool_choice: "required",
    ...one,
  });
  const response = await events.finalResponse();
  check(response.output.find((item) => item.type === "function_call").arguments);
  const stored = await client.responses.retrieve(response.id);
  assert.deepStrictEqual(stored.output, response.output.map(({ parsed_arguments, ...item }) => item));
}

main(process.argv[2]);
