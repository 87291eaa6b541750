/* Show texts as messages, whole and as they grow; returns what none of them may bring. */
(async (texts) => {
  window.hacked = () => { window.wasHacked = true; };
  const { MarkdownView } = await import(new URL("page/markdown.js", document.baseURI));
  const allowed = new Set(("p ul ol li a code pre figure figcaption span button blockquote strong em"
    + " del br hr div table thead tbody tr th td h3 h4 h5 h6").split(" "));
  const place = document.querySelector(".log");
  const bad = new Set();
  for (const [index, text] of texts.entries()) {
    const whole = document.createElement("div");
    place.append(whole);
    new MarkdownView(whole).update(text);
    for (const each of whole.querySelectorAll("*")) {
      if (!allowed.has(each.localName)) bad.add(each.localName);
      for (const { name, value } of each.attributes) {
        if (name.startsWith("on") || name === "style" || name === "src") bad.add(name);
        if (name === "href" && !/^(https?|mailto):/.test(value)) bad.add(value);
      }
    }
    if (index % 50 === 0 && text.length < 500) {
      const grown = document.createElement("div");
      const view = new MarkdownView(grown);
      for (let end = 0; end <= text.length; end += 7) view.update(text.slice(0, end));
      view.update(text);
      if (!grown.isEqualNode(whole)) bad.add(`grown: ${text}`);
    }
    whole.remove();
  }
  return [...bad];
})
