/* Markdown as elements, while it streams in.

Text becomes text nodes and a fixed set of elements; there is no way from it to markup, to an
attribute but a link's address, or to anything that loads. Every scan is linear: a text cannot make
the page stand still. */

import { button, make } from "./dom.js";

const MAX_DEPTH = 10;
const MAX_LINK_CHARS = 2000;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\s]*)/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const QUOTE = /^ {0,3}> ?/;
const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);
const MARKS = ["***", "**", "__", "~~", "*", "_"];
const ELEMENTS = { "**": "strong", "__": "strong", "~~": "del", "*": "em", _: "em" };

/* Shows a text that grows; what has not changed keeps its elements. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.shown = [];
  }

  update(text) {
    const blocks = blocksOf(text.replace(/\r\n?/g, "\n").replaceAll("\t", "    ").split("\n"));
    let same = 0;
    while (same < blocks.length && this.shown[same]?.source === sourceOf(blocks[same])) same++;
    for (const { node } of this.shown.splice(same)) node.remove();
    for (const block of blocks.slice(same)) {
      const node = elementOf(block, 0);
      this.shown.push({ source: sourceOf(block), node });
      this.element.append(node);
    }
  }
}

const sourceOf = (block) => `${block.kind}\n${block.lines.join("\n")}`;

/* Blocks. */

const isBlank = (line) => line.trim() === "";

function isRule(line) {
  const marks = line.replaceAll(" ", "");
  return marks.length > 2 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || at + 1 === lines.length) return false;
  const cells = cellsOf(lines[at + 1]);
  return lines[at + 1].includes("-") && cells.length === cellsOf(lines[at]).length
    && cells.every((cell) => /^:?-+:?$/.test(cell));
}

function kindAt(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (isRule(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  return isTable(lines, at) ? "table" : "paragraph";
}

function blocksOf(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) {
      at++;
      continue;
    }
    const kind = kindAt(lines, at);
    const end = ENDS[kind](lines, at);
    blocks.push({ kind, lines: lines.slice(at, end) });
    at = end;
  }
  return blocks;
}

const until = (lines, at, isEnd) => {
  while (at < lines.length && !isEnd(at)) at++;
  return at;
};

const ENDS = {
  heading: (_, at) => at + 1,
  rule: (_, at) => at + 1,
  quote: (lines, at) => until(lines, at, (i) => isBlank(lines[i])),
  table: (lines, at) => until(lines, at, (i) => !lines[i].includes("|")),
  paragraph: (lines, at) => until(
    lines, at, (i) => isBlank(lines[i]) || i > at && kindAt(lines, i) !== "paragraph"),
  code(lines, at) {
    const fence = FENCE.exec(lines[at])[1];
    const isEnd = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
    return Math.min(lines.length, until(lines, at + 1, (i) => isEnd(lines[i])) + 1);
  },
  list(lines, at) {
    let end = at + 1;
    for (let i = end; i < lines.length; i++) {
      const isPart = ITEM.test(lines[i]) && !isRule(lines[i]) || lines[i].startsWith("  ");
      if (isPart || !isBlank(lines[i]) && !isBlank(lines[i - 1]) && kindAt(lines, i) === "paragraph") end = i + 1;
      else if (!isBlank(lines[i])) break;
    }
    return end;
  },
};

function elementOf(block, depth) {
  const { kind, lines } = block;
  if (kind === "code") return codeBlock(lines);
  if (kind === "rule") return make("hr");
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    // The page's own headings are h1 and h2.
    return make(`h${Math.min(6, marks.length + 2)}`, {}, inline(text.replace(/ #+ *$/, ""), depth));
  }
  if (depth < MAX_DEPTH) {
    if (kind === "quote") {
      return make("blockquote", {}, inside(lines.map((line) => line.replace(QUOTE, "")), depth));
    }
    if (kind === "list") return list(lines, depth);
    if (kind === "table") return table(lines, depth);
  }
  return make("p", {}, inline(lines.join("\n"), depth));
}

const inside = (lines, depth) => blocksOf(lines).map((block) => elementOf(block, depth + 1));

function codeBlock(lines) {
  const [, fence, language] = FENCE.exec(lines[0]);
  const last = lines[lines.length - 1].trim();
  const isClosed = lines.length > 1 && last.startsWith(fence) && !last.replaceAll(fence[0], "");
  const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const copy = button("Copy", () => navigator.clipboard?.writeText(text), { "aria-label": "Copy this code" });
  return make("figure.code", {},
    make("figcaption", {}, make("span", {}, language || "text"), copy),
    make("pre", { tabIndex: 0, role: "group", "aria-label": "Code" }, make("code", {}, text)));
}

function list(lines, depth) {
  const [, , mark] = ITEM.exec(lines[0]);
  const isOrdered = /\d/.test(mark);
  const indent = ITEM.exec(lines[0])[1].length;
  const items = [];
  let offset = 0;
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length < Math.max(offset, indent + 1)) {
      offset = Math.min(found[0].length, found[1].length + found[2].length + 4);
      items.push([line.slice(offset)]);
    } else {
      const blanks = line.length - line.trimStart().length;
      items[items.length - 1].push(line.slice(Math.min(blanks, offset)));
    }
  }
  const made = items.map((own) => {
    const parts = inside(own, depth);
    // A tight item is not a paragraph of its own.
    const isTight = parts[0]?.tagName === "P" && parts.slice(1).every((each) => each.tagName !== "P");
    return make("li", {}, isTight ? [...parts[0].childNodes, ...parts.slice(1)] : parts);
  });
  const start = isOrdered ? Number.parseInt(mark, 10) : 1;
  return make(isOrdered ? "ol" : "ul", { start: start === 1 ? undefined : start }, made);
}

function cellsOf(line) {
  const cells = [""];
  for (let i = 0; i < line.length; i++) {
    if (line[i] === "\\" && line[i + 1] === "|") cells[cells.length - 1] += line[++i];
    else if (line[i] === "|") cells.push("");
    else cells[cells.length - 1] += line[i];
  }
  if (isBlank(cells[0])) cells.shift();
  if (cells.length && isBlank(cells[cells.length - 1])) cells.pop();
  return cells.map((cell) => cell.trim());
}

function table([head, , ...body], depth) {
  const width = cellsOf(head).length;
  const row = (line, tag) => make("tr", {}, Array.from(
    { length: width }, (_, i) => make(tag, {}, inline(cellsOf(line)[i] ?? "", depth))));
  return make("div.table", { tabIndex: 0, role: "region", "aria-label": "Table" }, make("table", {},
    make("thead", {}, row(head, "th")), make("tbody", {}, body.map((line) => row(line, "td")))));
}

/* Inline. */

export function safeAddress(text) {
  try {
    const url = new URL(text);
    return PROTOCOLS.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function link(address, label) {
  const href = safeAddress(address);
  if (href === null) return label;
  return [make("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, label)];
}

/* Return the nodes of a text. What a mark does not close stays as it was written. */
function inline(text, depth) {
  const nodes = [];
  const unclosed = new Set();
  let plain = 0;
  const put = (at, next, made) => {
    if (plain < at) nodes.push(text.slice(plain, at));
    nodes.push(...made);
    plain = next;
    return next;
  };
  for (let at = 0; at < text.length;) {
    const found = depth < MAX_DEPTH ? SPANS[text[at]]?.(text, at, depth, unclosed) : null;
    if (found) at = put(at, found.next, found.nodes);
    else if (text.startsWith("http", at) && !/\w/.test(text[at - 1] ?? "")) at = bare(text, at, put);
    else at++;
  }
  put(text.length, text.length, []);
  return nodes;
}

function bare(text, at, put) {
  const [word] = /^\S{0,2000}/.exec(text.slice(at, at + MAX_LINK_CHARS));
  if (!/^https?:\/\/./.test(word)) return at + 4;
  const address = word.replace(/[<>"'`|].*$/, "").replace(/[.,;:!?)\]}*_]+$/, "");
  return put(at, at + address.length, link(address, [address]));
}

function emphasis(text, at, depth, unclosed) {
  const mark = MARKS.find((each) => text.startsWith(each, at) && !unclosed.has(each));
  if (mark === undefined) return null;
  const begin = at + mark.length;
  const isWordy = mark[0] === "_";
  if (/\s/.test(text[begin] ?? " ") || isWordy && /\w/.test(text[at - 1] ?? "")) return null;
  for (let end = text.indexOf(mark, begin + 1); end !== -1; end = text.indexOf(mark, end + 1)) {
    const after = text[end + mark.length] ?? "";
    const isOwn = mark.length > 1 || text[end - 1] !== mark && after !== mark;
    if (!isOwn || /\s/.test(text[end - 1]) || isWordy && /\w/.test(after)) continue;
    const inner = inline(text.slice(begin, end), depth + 1);
    const nodes = mark === "***"
      ? [make("strong", {}, make("em", {}, inner))] : [make(ELEMENTS[mark], {}, inner)];
    return { next: end + mark.length, nodes };
  }
  unclosed.add(mark);
  return null;
}

function bracketed(text, at, depth, isImage) {
  const limit = Math.min(text.length, at + MAX_LINK_CHARS);
  let open = 0;
  let end = at;
  for (; end < limit; end++) {
    if (text[end] === "\\") end++;
    else if (text[end] === "[") open++;
    else if (text[end] === "]" && --open === 0) break;
  }
  if (end >= limit || text[end + 1] !== "(") return null;
  const close = end + 2 + text.slice(end + 2, limit).indexOf(")");
  if (close < end + 2) return null;
  const address = text.slice(end + 2, close).trim().split(/[ \n]/)[0].replace(/^<|>$/g, "");
  const label = inline(text.slice(at + 1, end), Math.max(depth + 1, MAX_DEPTH - 2));
  // Nothing is loaded from elsewhere: a picture is a link to it.
  return { next: close + 1, nodes: link(address, isImage ? ["picture: ", ...label] : label) };
}

const SPANS = {
  "\\": (text, at) => /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? { next: at + 2, nodes: [text[at + 1]] } : null,
  "\n": (_, at) => ({ next: at + 1, nodes: [make("br")] }),
  "*": emphasis,
  "~": emphasis,
  _: emphasis,
  "[": (text, at, depth) => bracketed(text, at, depth, false),
  "!"(text, at, depth) {
    return text[at + 1] === "[" ? bracketed(text, at + 1, depth, true) : null;
  },
  "<"(text, at) {
    const [, address] = /^<([^<>\s]*)>/.exec(text.slice(at, at + MAX_LINK_CHARS)) ?? [];
    return address === undefined || safeAddress(address) === null
      ? null : { next: at + address.length + 2, nodes: link(address, [address]) };
  },
  "`"(text, at, _, unclosed) {
    const [mark] = /^`+/.exec(text.slice(at, at + 64));
    if (unclosed.has(mark)) return null;
    for (let end = text.indexOf(mark, at + mark.length); end !== -1; end = text.indexOf(mark, end + 1)) {
      if (text[end - 1] === "`" || text[end + mark.length] === "`") continue;
      const code = text.slice(at + mark.length, end).replaceAll("\n", " ");
      return { next: end + mark.length, nodes: [make("code", {}, code)] };
    }
    unclosed.add(mark);
    return null;
  },
};
