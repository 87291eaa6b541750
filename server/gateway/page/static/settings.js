/* The settings of a conversation: system prompt, sampling, tools. */

import { SAMPLING } from "./answer.js";
import { button, make } from "./dom.js";

export class SettingsDialog {
  constructor(changed) {
    this.fields = new Map();
    const numbers = SAMPLING.map(({ name, label, ...limits }) => this.field(name, label,
      make("input", { type: "number", inputmode: "decimal", ...limits })));
    this.problem = make("p.problem", { role: "alert", hidden: true });
    this.element = make("dialog.settings", { "aria-labelledby": "settings-title" },
      make("h2", { id: "settings-title" }, "Settings of this conversation"),
      this.field("system", "System prompt", make("textarea", { rows: 4 })),
      make("div.numbers", {}, numbers),
      this.field("tools", "Tools, as in OpenAI's API", make("textarea", { rows: 3, spellcheck: "false", placeholder: '[{"type": "function", "function": {"name": …}}]' })),
      make("label.check", {}, this.check = make("input", { type: "checkbox" }), " Show how likely tokens were (Tokens, below an answer)"),
      this.problem,
      make("div.row.end", {}, button("Cancel", () => this.element.close()),
        button("Save", () => this.use(changed), { class: "primary" })));
  }

  field(name, label, input) {
    input.id = `setting-${name}`;
    this.fields.set(name, input);
    return make("div.field", {}, make("label", { for: input.id }, label), input);
  }

  /* `defaults` are the server's, where a field is empty. */
  show(settings, defaults = {}) {
    for (const [name, input] of this.fields) {
      input.value = settings[name] ?? "";
      if (typeof defaults[name] === "number") input.placeholder = `${defaults[name]}`;
    }
    this.check.checked = Boolean(settings.logprobs);
    this.problem.hidden = true;
    this.element.showModal();
  }

  use(changed) {
    const settings = { logprobs: this.check.checked };
    for (const [name, input] of this.fields) {
      if (input.type === "number" && !input.checkValidity()) {
        this.tell(`${input.labels[0].textContent}: ${input.validationMessage}`, input);
        return;
      }
      if (input.value.trim()) settings[name] = input.type === "number" ? input.valueAsNumber : input.value;
    }
    try {
      if (settings.tools && !Array.isArray(JSON.parse(settings.tools))) throw new Error("it is no list");
    } catch (error) {
      this.tell(`Tools: ${error.message}`, this.fields.get("tools"));
      return;
    }
    changed(settings);
    this.element.close();
  }

  tell(text, input) {
    this.problem.textContent = text;
    this.problem.hidden = false;
    input.focus();
  }
}
