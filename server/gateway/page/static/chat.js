/* The chat: conversations, the one that is shown, and what is written next. */

import { answer } from "./answer.js";
import { getJson } from "./api.js";
import { announce, button, coalesced, make } from "./dom.js";
import { MessageView } from "./message.js";
import { SettingsDialog } from "./settings.js";
import * as store from "./store.js";

// Of a long conversation the last ones are shown, and as many more at a time.
const SHOWN = 50;
const MAX_TITLE_CHARS = 60;

export class Chat {
  constructor(section) {
    this.section = section;
    this.model = null;
    this.running = null;
    this.settings = new SettingsDialog((settings) => this.changeSettings(settings));
    this.list = make("ul.conversations", { id: "conversations" });
    this.log = make("div.log", { role: "log", "aria-label": "Messages", "aria-live": "off", tabIndex: 0 });
    this.problem = make("p.problem", { role: "alert", hidden: true });
    section.append(this.side(), make("div.talk", {}, this.bar(), this.log, this.problem, this.composer()),
      this.settings.element);
    store.onChange((id) => this.changedElsewhere(id));
    this.show(store.conversation(store.titles()[0]?.id) ?? store.newConversation(store.settings()));
  }

  side() {
    this.fold = make("aside.side", { id: "side", "aria-label": "Conversations" },
      button("New conversation", () => this.begin(), { class: "primary", id: "new" }), this.list,
      make("p.minor", {}, "Conversations are kept in this browser only."));
    return this.fold;
  }

  bar() {
    this.title = make("h2", {}, "");
    const list = button("☰", () => {
      const isOpen = this.section.classList.toggle("listing");
      list.setAttribute("aria-expanded", isOpen);
    }, { class: "plain only-narrow", "aria-label": "Conversations", "aria-expanded": "false", "aria-controls": "side" });
    this.listButton = list;
    const menu = make("details.menu", {}, make("summary", {}, "More"), make("div", {},
      button("Export as Markdown", () => this.export("md", "text/markdown", store.asMarkdown)),
      button("Export as JSON", () => this.export("json", "application/json", (each) => JSON.stringify(each, null, 2))),
      button("Delete", () => this.remove(), { class: "danger" })));
    return make("div.bar", {}, list, this.title,
      button("Settings", () => this.settings.show(this.shown.settings, this.defaults), { id: "settings" }), menu);
  }

  composer() {
    this.field = make("textarea", {
      id: "prompt", rows: 1, "aria-label": "Your message", placeholder: "Ask something",
      input: () => this.fit(),
      keydown: (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          this.send();
        } else if (event.key === "Escape") this.stop();
      },
    });
    this.sendButton = button("Send", () => (this.running ? this.stop() : this.send()), { id: "send", class: "primary" });
    return make("div.composer", {}, this.field, this.sendButton);
  }

  fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight + 2, 240)}px`;
  }

  /* Conversations. */

  begin() {
    this.stop();
    this.show(store.newConversation(store.settings()));
    this.field.focus();
  }

  open(id) {
    const found = store.conversation(id);
    if (!found) return;
    this.stop();
    this.show(found);
  }

  remove() {
    if (!confirm("Delete this conversation? It is in this browser only.")) return;
    this.stop();
    store.forget(this.shown.id);
    this.show(store.conversation(store.titles()[0]?.id) ?? store.newConversation(store.settings()));
  }

  show(conversation) {
    this.shown = conversation;
    this.section.classList.remove("listing");
    this.listButton.setAttribute("aria-expanded", "false");
    this.problem.hidden = true;
    this.render(Math.max(0, conversation.messages.length - SHOWN));
    this.listTitles();
  }

  listTitles() {
    this.title.textContent = this.shown.title || "New conversation";
    this.list.replaceChildren(...store.titles().map(({ id, title }) => make("li", {},
      button(title || "Untitled", () => this.open(id), { "aria-current": id === this.shown.id ? "true" : null }))));
  }

  keep() {
    const { messages } = this.shown;
    this.shown.title ||= titleOf(messages[0]?.content ?? "");
    if (!store.keep(this.shown)) this.tell("This browser has no room for more: export and delete conversations.");
    this.listTitles();
  }

  changedElsewhere(id) {
    if (id !== null && id === this.shown.id && !this.running) {
      const found = store.conversation(id);
      if (found) this.show(found);
    }
    this.listTitles();
  }

  changeSettings(settings) {
    this.shown.settings = settings;
    store.keepSettings(settings);
    if (this.shown.messages.length) this.keep();
  }

  export(suffix, type, form) {
    const url = URL.createObjectURL(new Blob([form(this.shown)], { type }));
    const name = (this.shown.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
    make("a", { href: url, download: `${name}.${suffix}` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  }

  /* Messages. */

  render(from) {
    const { messages } = this.shown;
    this.views = messages.slice(from).map((each, index) => this.viewOf(each, from + index));
    const earlier = from > 0
      ? [button(`Show ${Math.min(SHOWN, from)} earlier messages of ${from}`, () => this.render(Math.max(0, from - SHOWN)))]
      : [];
    const empty = messages.length ? [] : [this.welcome()];
    this.log.replaceChildren(...earlier, ...empty, ...this.views.map(({ element }) => element));
    this.follow(true);
  }

  viewOf(message, index) {
    const isLast = index === this.shown.messages.length - 1;
    const { role } = message;
    return new MessageView(message, {
      edit: role === "user" ? (text) => this.cut(index, { role: "user", content: text }) : null,
      regenerate: role === "assistant" && isLast ? () => this.cut(index) : null,
      answerTool: role === "assistant" && isLast
        ? (id, text) => this.answerTool(message, id, text) : null,
    });
  }

  welcome() {
    const tries = ["Explain in two sentences why the sky is blue.", "Write a Python function that reverses a list.",
      "What is a Mixture-of-Experts model?"];
    return make("div.welcome", {}, make("p", {}, "Ask the model something. Watch it work under ",
      make("a", { href: "#rally" }, "Rally"), "."), make("div.row", {}, tries.map((text) => button(text, () => {
      this.field.value = text;
      this.send();
    }))));
  }

  /* Drop the messages from `index` on, add `next` if there is one, and have it answered. */
  cut(index, next) {
    this.stop();
    this.shown.messages.splice(index);
    if (next) this.shown.messages.push(next);
    this.reply();
  }

  answerTool(message, id, text) {
    const { messages } = this.shown;
    messages.push({ role: "tool", tool_call_id: id, content: text });
    const isAnswered = ({ id: own }) => messages.some((each) => each.tool_call_id === own);
    if (message.tool_calls.every(isAnswered)) this.reply();
    else this.render(Math.max(0, messages.length - SHOWN));
  }

  send() {
    const text = this.field.value.trim();
    if (!text || this.running) return;
    this.field.value = "";
    this.fit();
    this.shown.messages.push({ role: "user", content: text });
    this.reply();
  }

  stop() {
    this.running?.abort();
  }

  async reply() {
    const conversation = this.shown;
    const running = this.running = new AbortController();
    const asked = { settings: conversation.settings, messages: [...conversation.messages] };
    const message = { role: "assistant", content: "" };
    this.keep();
    conversation.messages.push(message);
    this.problem.hidden = true;
    this.sendButton.textContent = "Stop";
    this.render(Math.max(0, conversation.messages.length - SHOWN));
    const view = this.views[this.views.length - 1];
    const update = coalesced(() => {
      view.update(true);
      this.follow(false);
    });
    update.now();
    try {
      await this.ready();
      await answer(this.model, asked, message, { signal: running.signal, grown: update.later });
    } catch (error) {
      if (this.shown === conversation) this.tell(`The answer failed: ${error.message}.`, () => this.again(message));
      message.stats = { ...message.stats, finish: "failed" };
    }
    update.now();
    if (this.running === running) {
      this.running = null;
      this.sendButton.textContent = "Send";
    }
    const isEmpty = !message.content && !message.reasoning && !message.tool_calls && !message.stats?.tokens;
    if (isEmpty && conversation.messages[conversation.messages.length - 1] === message) conversation.messages.pop();
    if (this.shown === conversation) {
      this.keep();
      if (isEmpty) view.element.remove();
      else view.update(false);
      this.follow(false);
      announce("The answer has ended.");
    } else store.keep(conversation);
  }

  again(message) {
    const { messages } = this.shown;
    const index = messages.indexOf(message);
    this.cut(index === -1 ? messages.length : index);
  }

  /* Wait until the name and the defaults of the model are known. */
  async ready() {
    if (this.model) return;
    const { data: [card] } = await getJson("v1/models");
    this.model = card.id;
    this.defaults = card.default_sampling_params;
  }

  tell(text, again) {
    this.problem.replaceChildren(text, ...(again ? [" ", button("Try again", again)] : []));
    this.problem.hidden = false;
  }

  /* Keep the end in sight, unless the reader has scrolled away from it. */
  follow(always) {
    const { log } = this;
    const left = log.scrollHeight - log.scrollTop - log.clientHeight;
    if (always || left < 120) log.scrollTop = log.scrollHeight;
  }
}

function titleOf(text) {
  const title = text.replace(/\s+/g, " ");
  return title.length > MAX_TITLE_CHARS ? `${title.slice(0, MAX_TITLE_CHARS - 1)}…` : title;
}
