/* What is wrong with what is shown now: names, headings, contrast, sizes and edges. */
(() => {
  const bad = [];
  const seen = (each) => each.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const name = (each) => `${each.localName}.${each.className?.baseVal ?? each.className} `
    + each.textContent.slice(0, 30);
  const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
  bad.push(...ids.filter((id, index) => ids.indexOf(id) !== index).map((id) => `twice: ${id}`));
  for (const each of document.querySelectorAll("[aria-controls], [aria-labelledby], label[for]")) {
    for (const kind of ["aria-controls", "aria-labelledby", "for"]) {
      const id = each.getAttribute(kind);
      if (id && !document.getElementById(id)) bad.push(`${kind} of nothing: ${id}`);
    }
  }
  let level = 0;
  for (const each of document.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    if (!seen(each) || each.closest("dialog")) continue;
    if (Number(each.localName[1]) > level + 1) bad.push(`heading skips a level: ${name(each)}`);
    level = Number(each.localName[1]);
  }
  const rgb = (text) => {
    const [red, green, blue, alpha = 1] = text.match(/[\d.]+/g).map(Number);
    return { parts: [red, green, blue], alpha };
  };
  const over = ({ parts, alpha }, below) => parts.map(
    (part, index) => part * alpha + below[index] * (1 - alpha));
  const light = (parts) => {
    const [r, g, b] = parts.map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (each) => {
    const own = rgb(getComputedStyle(each).backgroundColor);
    if (own.alpha === 1) return own.parts;
    return over(own, each.parentElement ? behind(each.parentElement) : [255, 255, 255]);
  };
  const modal = document.querySelector("dialog[open]");
  for (const each of document.querySelectorAll("body *")) {
    if (modal && !modal.contains(each)) continue;
    const hasText = [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!hasText || !seen(each) || each.closest("svg, .skip, .heard")) continue;
    const style = getComputedStyle(each);
    const below = behind(each);
    const [more, less] = [light(over(rgb(style.color), below)), light(below)].sort((a, b) => b - a);
    const isLarge = parseFloat(style.fontSize) >= 24;
    const ratio = (more + 0.05) / (less + 0.05);
    if (ratio < (isLarge ? 3 : 4.5)) bad.push(`contrast ${ratio.toFixed(2)}: ${name(each)}`);
  }
  for (const each of document.querySelectorAll("button, nav a, summary, select, input, textarea")) {
    if (!seen(each) || each.closest(".skip")) continue;
    const { width, height } = (each.closest("label") ?? each).getBoundingClientRect();
    if (width && Math.min(width, height) < 24) bad.push(`${width} x ${height}: ${name(each)}`);
  }
  const { scrollWidth } = document.documentElement;
  if (scrollWidth > innerWidth) bad.push(`wider than the window: ${scrollWidth}`);
  const clips = (up) => up && (getComputedStyle(up).overflowX !== "visible"
    || clips(up.parentElement));
  for (const each of document.querySelectorAll("main *")) {
    const { right, width } = each.getBoundingClientRect();
    if (seen(each) && width && right > innerWidth + 1 && !clips(each.parentElement)) {
      bad.push(`beyond the edge: ${name(each)}`);
    }
  }
  return bad;
})()
