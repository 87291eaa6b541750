/* One answer of the model: its request, its growth, and what it took. Knows no element. */

import { call, events } from "./api.js";

export const SAMPLING = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.01 },
  { name: "top_k", label: "Top k", min: -1, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "max_tokens", label: "Most tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", step: 1 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0, max: 2, step: 0.05 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
];
const TOP_LOGPROBS = 4;

/* The log-probabilities of answers of this visit, which are too large to be kept. */
export const logprobsOf = new WeakMap();

function requestOf(model, { settings, messages }) {
  const body = { model, stream: true, stream_options: { include_usage: true } };
  const system = settings.system?.trim();
  body.messages = [
    ...(system ? [{ role: "system", content: system }] : []),
    ...messages.map(({ role, content, tool_calls: calls, tool_call_id: id }) => ({
      role,
      content: content || (calls?.length ? null : ""),
      ...(calls?.length ? { tool_calls: calls } : {}),
      ...(id ? { tool_call_id: id } : {}),
    })),
  ];
  for (const { name } of SAMPLING) {
    if (typeof settings[name] === "number") body[name] = settings[name];
  }
  if (settings.tools?.trim()) body.tools = JSON.parse(settings.tools);
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  return body;
}

function growCalls(calls, deltas) {
  for (const { index, id, function: { name, arguments: text = "" } = {} } of deltas) {
    const known = calls[index] ??= { id, type: "function", function: { name, arguments: "" } };
    known.function.arguments += text;
  }
}

/* Stream an answer to `asked` into `message`; `grown` is called after each piece.

Ends without an error when `signal` stops it. */
export async function answer(model, asked, message, { signal, grown }) {
  const began = performance.now();
  const stats = message.stats = {};
  const tokens = [];
  let first = null;
  try {
    const response = await call("v1/chat/completions", { body: requestOf(model, asked), signal });
    for await (const { choices: [choice], usage } of events(response)) {
      if (usage) Object.assign(stats, statsOf(usage));
      if (!choice) continue;
      const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
      if (content || reasoning || calls) {
        stats.last = (performance.now() - began) / 1e3;
        first ??= stats.last;
        stats.pieces = (stats.pieces ?? 0) + 1;
      }
      if (content) message.content += content;
      if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
      if (calls) growCalls(message.tool_calls ??= [], calls);
      if (choice.logprobs) tokens.push(...choice.logprobs.content);
      if (choice.finish_reason) stats.finish = choice.finish_reason;
      grown();
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    stats.finish = "stopped";
  } finally {
    stats.ttft = first;
    if (tokens.length) logprobsOf.set(message, tokens);
  }
}

function statsOf(usage) {
  return {
    prompt: usage.prompt_tokens,
    tokens: usage.completion_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    reasoning: usage.completion_tokens_details?.reasoning_tokens ?? 0,
    accepted: usage.completion_tokens_details?.accepted_prediction_tokens ?? 0,
  };
}
