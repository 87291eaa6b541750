/* The page: its three views, and the state of the engine in its head. */

import { Chat } from "./chat.js";
import { byId, showState } from "./dom.js";

const STATE_EVERY_MS = 10000;
const VIEWS = ["chat", "rally", "engine"];

const chat = new Chat(byId("chat"));
let live = null;

/* The views of the engine are loaded when they are first looked at. */
async function liveView() {
  const { Live } = await import("./live.js");
  live ??= new Live(byId("rally"), byId("engine"));
  return live;
}

async function showView() {
  const asked = location.hash.slice(1);
  const shown = VIEWS.includes(asked) ? asked : VIEWS[0];
  for (const name of VIEWS) {
    byId(name).hidden = name !== shown;
    if (name === shown) byId(`to-${name}`).setAttribute("aria-current", "page");
    else byId(`to-${name}`).removeAttribute("aria-current");
  }
  document.title = shown === "chat" ? "Topspin" : `${shown[0].toUpperCase()}${shown.slice(1)} · Topspin`;
  if (shown !== "chat" || live) (await liveView()).look(shown);
}

async function askState() {
  let state = "no connection";
  try {
    ({ state } = await (await fetch("health", { cache: "no-store" })).json());
  } catch {
    // It says so itself.
  }
  showState(state);
}

addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", () => { if (!document.hidden) askState(); });
setInterval(() => { if (!document.hidden) askState(); }, STATE_EVERY_MS);
askState();
showView();
if (!matchMedia("(pointer: coarse)").matches && !byId("chat").hidden) chat.field.focus();
