/* How one message of a conversation is shown. Knows no server and no other message. */

import { logprobsOf } from "./answer.js";
import { announce, button, duration, make, number } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const NAMES = { user: "You", assistant: "Model", tool: "Result of a tool" };
const FINISHES = { length: "cut off at the limit of tokens", stopped: "stopped by you", tool_calls: "waits for a tool" };

/* `actions`: what the buttons do, by name; one that is missing has no button. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.body = make("div.body");
    this.content = new MarkdownView(this.body);
    this.calls = make("div");
    this.stats = make("p.stats");
    this.tools = make("div.actions");
    const { role } = message;
    this.element = make(`article.message.${role}`, { "aria-label": NAMES[role] },
      make("h3", {}, NAMES[role]), this.reasoning(), this.body, this.calls,
      make("footer", {}, this.stats, this.tools));
    this.update(false);
  }

  reasoning() {
    this.thoughts = make("div.body.thoughts");
    this.thinking = new MarkdownView(this.thoughts);
    this.fold = make("details.fold", { hidden: true }, make("summary", {}, "Reasoning"), this.thoughts);
    return this.fold;
  }

  update(isGrowing) {
    const { message } = this;
    this.element.setAttribute("aria-busy", isGrowing);
    this.fold.hidden = !message.reasoning;
    if (message.reasoning) {
      this.fold.firstChild.textContent = isGrowing && !message.content ? "Reasoning …" : "Reasoning";
      this.thinking.update(message.reasoning);
    }
    if (message.role === "user" || message.role === "tool") this.body.textContent = message.content;
    else if (!this.tokens) this.content.update(message.content);
    this.body.classList.toggle("waiting", isGrowing && !message.content && !message.reasoning);
    this.calls.replaceChildren(...(message.tool_calls ?? []).map((each) => this.toolCall(each, isGrowing)));
    this.stats.replaceChildren(statsText(message, isGrowing));
    if (!isGrowing) this.tools.replaceChildren(...this.buttons());
  }

  buttons() {
    const { message, actions } = this;
    const made = [];
    // Pages of another host have a clipboard only over HTTPS.
    if (navigator.clipboard) {
      made.push(button("Copy", () => navigator.clipboard.writeText(message.content)
        .then(() => announce("Copied."), () => announce("The browser does not let this page copy."))));
    }
    if (actions.edit) made.push(button("Edit", () => this.edit()));
    if (actions.regenerate) made.push(button("Regenerate", actions.regenerate));
    if (logprobsOf.has(message)) {
      const toggle = button("Tokens", () => {
        this.tokens = this.tokens ? null : tokensOf(logprobsOf.get(message));
        toggle.setAttribute("aria-pressed", this.tokens !== null);
        this.content = new MarkdownView(this.body);
        this.body.replaceChildren(...(this.tokens ? [this.tokens] : []));
        this.update(false);
        this.tools.querySelector("[aria-pressed]").focus();
      }, { "aria-pressed": String(Boolean(this.tokens)) });
      made.push(toggle);
    }
    return made;
  }

  edit() {
    const field = make("textarea", { rows: 3, "aria-label": "Your message", value: this.message.content });
    const end = () => {
      form.replaceWith(this.body);
      this.tools.hidden = false;
    };
    const send = () => {
      if (field.value.trim()) this.actions.edit(field.value.trim());
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      } else if (event.key === "Escape") end();
    });
    const form = make("div.editing", {}, field, make("div.row.end", {},
      button("Cancel", end), button("Send again", send, { class: "primary" })));
    this.tools.hidden = true;
    this.body.replaceWith(form);
    field.focus();
  }

  toolCall({ id, function: { name, arguments: text } }, isGrowing) {
    const card = make("figure.code", {}, make("figcaption", {}, make("span", {}, `calls ${name}`)),
      make("pre", { tabIndex: 0, role: "group", "aria-label": `Arguments of ${name}` }, make("code", {}, pretty(text))));
    if (isGrowing || !this.actions.answerTool) return card;
    const field = make("textarea", { rows: 2, "aria-label": `Result of ${name}`, placeholder: `What ${name} returns` });
    return make("div", {}, card, make("div.tool-result", {}, field,
      button("Send the result", () => this.actions.answerTool(id, field.value))));
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function statsText({ role, stats, content, reasoning, tool_calls: calls }, isGrowing) {
  if (role !== "assistant" || !stats) return "";
  const parts = [];
  if (stats.tokens !== undefined) {
    parts.push(`${number(stats.tokens)} tokens`);
    const took = stats.last - stats.ttft;
    if (stats.tokens > 1 && took > 0) parts.push(`${number((stats.tokens - 1) / took, 1)} tokens/s`);
  } else if (isGrowing && stats.pieces) parts.push(`${number(stats.pieces)} pieces`);
  if (stats.ttft) parts.push(`first token after ${duration(stats.ttft)}`);
  if (stats.prompt) parts.push(`${number(stats.cached)} of ${number(stats.prompt)} prompt tokens cached`);
  if (stats.tokens > 4 * stats.pieces / 3) parts.push(`${number(stats.tokens / stats.pieces, 1)} tokens at a time`);
  if (stats.accepted) parts.push(`${number(stats.accepted)} of them drafted`);
  if (!isGrowing && !content && !reasoning && !calls) parts.push("an empty answer");
  if (!isGrowing && FINISHES[stats.finish]) parts.push(FINISHES[stats.finish]);
  return parts.join(" · ");
}

const percent = (logprob) => `${number(100 * Math.exp(logprob), logprob > -4.6 ? 1 : 3)} %`;

/* The tokens of an answer, darker the less likely they were; a line below tells of one of them. */
function tokensOf(tokens) {
  const line = make("p.candidates", { "aria-live": "polite" }, "Point at a token, or reach it with the arrow keys.");
  const tell = ({ target }) => {
    const told = tokens[target.dataset.index];
    if (!told) return;
    const others = told.top_logprobs.filter(({ token }) => token !== told.token);
    line.replaceChildren(
      make("b", {}, JSON.stringify(told.token)), ` ${percent(told.logprob)}`,
      ...others.map((each) => make("span", {}, make("code", {}, JSON.stringify(each.token)), ` ${percent(each.logprob)}`)));
  };
  const spans = tokens.map(({ token, logprob }, index) => make(
    `span.token.p${Math.max(0, Math.min(4, Math.floor(-logprob)))}`,
    { "data-index": index, tabIndex: index ? -1 : 0, role: "option", "aria-label": JSON.stringify(token) }, token));
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = step && spans[Number(event.target.dataset.index) + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
  };
  return make("div", {}, make("div.tokens", { role: "listbox", "aria-label": "Tokens", mouseover: tell, focusin: tell, keydown: move }, spans), line);
}
