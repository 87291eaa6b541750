/* Elements made without markup: text stays text, whoever wrote it. */

const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "open", "tabIndex"]);
const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false && !PROPERTIES.has(name)) continue;
    if (typeof value === "function") made.addEventListener(name, value);
    else if (PROPERTIES.has(name)) made[name] = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/* `tag` may have classes, as in "p.minor"; a function among the attributes listens to its event. */
export function make(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const made = document.createElement(name);
  if (classes.length) made.className = classes.join(" ");
  return fill(made, attributes, children);
}

export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function button(text, click, attributes = {}) {
  return make("button", { type: "button", click, ...attributes }, text);
}

export const byId = (id) => document.getElementById(id);

/* Have a screen reader say something. */
export function announce(text) {
  byId("announce").textContent = text;
}

/* The state of the engine, in the page's head. Only a change is said. */
export function showState(state) {
  if (byId("state-text").textContent !== state) byId("state-text").textContent = state;
  byId("state").dataset.state = state;
}

/* A function that runs `work` once, in the next frame, however often it is called before. */
export function coalesced(work) {
  let due = 0;
  const run = () => {
    cancelAnimationFrame(due);
    due = 0;
    work();
  };
  const later = () => {
    if (!due) due = requestAnimationFrame(run);
  };
  return { later, now: run };
}

export function number(value, digits = 0) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/* A duration in the unit in which it has a few digits. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return `${number(seconds * 1e6)} µs`;
  if (seconds < 1) return `${number(seconds * 1e3, seconds < 0.1 ? 2 : 0)} ms`;
  return `${number(seconds, 2)} s`;
}

export function bytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; size >= 1024 && unit < units.length - 1; unit++) size /= 1024;
  return `${number(size, size < 10 && unit ? 1 : 0)} ${units[unit]}`;
}
