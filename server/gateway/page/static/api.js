/* Calls of this server, by URLs relative to the page: it may be behind a proxy's prefix.

The key is asked for at the first 401 and is never stored. */

import { byId } from "./dom.js";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let key = null;
let asking = null;

export async function call(path, { body, signal } = {}) {
  for (;;) {
    const used = key;
    const headers = used === null ? {} : { Authorization: `Bearer ${used}` };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      body: body === undefined ? undefined : JSON.stringify(body),
      headers,
      signal,
      cache: "no-store",
      credentials: "same-origin",
    });
    if (response.status === 401) {
      if (key === used) await askForKey(used !== null);
      continue;
    }
    if (!response.ok) throw new ApiError(await messageOf(response), response.status);
    return response;
  }
}

export async function getJson(path, options) {
  return (await call(path, options)).json();
}

async function messageOf(response) {
  try {
    const { error, detail } = await response.json();
    return error?.message ?? detail ?? `the server answered ${response.status}`;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/* Several calls may need the key at once: they wait for the same answer. */
function askForKey(wasRefused) {
  asking ??= showKeyDialog(wasRefused).finally(() => { asking = null; });
  return asking;
}

function showKeyDialog(wasRefused) {
  const dialog = byId("key-dialog");
  const field = byId("key-field");
  const problem = byId("key-problem");
  problem.hidden = !wasRefused;
  problem.textContent = wasRefused ? "That key was refused. Is it complete, and of this server?" : "";
  field.value = "";
  dialog.showModal();
  field.focus();
  return new Promise((resolve, reject) => {
    const listening = new AbortController();
    const on = (target, event, react) => target.addEventListener(event, react, listening);
    const end = (settle, value) => {
      listening.abort();
      field.value = "";
      if (dialog.open) dialog.close();
      settle(value);
    };
    const use = () => {
      key = field.value.trim();
      if (key) end(resolve);
    };
    const refuse = () => end(reject, new ApiError("this server asks for an API key", 401));
    on(byId("key-use"), "click", use);
    on(field, "keydown", (event) => { if (event.key === "Enter") use(); });
    on(byId("key-cancel"), "click", refuse);
    on(dialog, "cancel", refuse);
  });
}

/* Yield the JSON of each event of a stream, until its [DONE]. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError("the stream ended early", 0);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, event.error.code);
      yield event;
    }
  }
}
