/* Conversations and settings, in this browser and nowhere else.

Each conversation has an entry of its own, so that two tabs overwrite only what both change. */

const INDEX = "topspin.conversations";
const SETTINGS = "topspin.settings";
const OF_ONE = "topspin.conversation.";

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/* Return whether there was room for it. */
function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const titles = () => read(INDEX, []).sort((a, b) => b.updated - a.updated);

export function conversation(id) {
  const found = read(OF_ONE + id, null);
  return Array.isArray(found?.messages) ? found : null;
}

export function newConversation(settings) {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", settings, messages: [] };
}

export function keep(kept) {
  const entry = { id: kept.id, title: kept.title, updated: Date.now() };
  return write(OF_ONE + kept.id, kept)
    && write(INDEX, [...read(INDEX, []).filter(({ id }) => id !== kept.id), entry]);
}

export function forget(id) {
  localStorage.removeItem(OF_ONE + id);
  write(INDEX, read(INDEX, []).filter((each) => each.id !== id));
}

export const settings = () => read(SETTINGS, {});
export const keepSettings = (value) => write(SETTINGS, value);

/* Call `react` with a conversation's id, or null for their list, when another tab has changed it. */
export function onChange(react) {
  addEventListener("storage", ({ key }) => {
    if (key === INDEX || key === null) react(null);
    else if (key.startsWith(OF_ONE)) react(key.slice(OF_ONE.length));
  });
}

export function asMarkdown({ title, settings: { system }, messages }) {
  const parts = [`# ${title}`];
  if (system) parts.push(`## System\n\n${system}`);
  for (const { role, content, reasoning, tool_calls: calls = [] } of messages) {
    parts.push(`## ${role[0].toUpperCase()}${role.slice(1)}`);
    if (reasoning) parts.push(`<details><summary>Reasoning</summary>\n\n${reasoning}\n\n</details>`);
    if (content) parts.push(content);
    for (const { function: called } of calls) {
      parts.push(`\`\`\`json\n${JSON.stringify({ tool: called.name, arguments: called.arguments }, null, 2)}\n\`\`\``);
    }
  }
  return `${parts.join("\n\n")}\n`;
}
