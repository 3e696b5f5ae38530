// Elements of the page.

const NS = "http://www.w3.org/2000/svg";

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(NS, tag);
  set(made, attributes);
  made.append(...children);
  return made;
}

export function set(made, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) made.removeAttribute(name);
    else made.setAttribute(name, value);
  }
}

// [alpha:α] in a formula lights up when the field alpha changes; letters are variables.
export function formula(text) {
  const made = element("span", { class: "formula" });
  for (const part of text.split(/(\[\w+:[^\]]*\])/)) {
    const marked = part.match(/^\[(\w+):([^\]]*)\]$/);
    const target = marked ? element("span", { class: "mark", "data-of": marked[1] }) : made;
    for (const word of (marked ? marked[2] : part).split(/([A-Za-zα-ω]+)/)) {
      if (/^[A-Za-zα-ωΣ]$/.test(word)) target.append(element("i", {}, word));
      else if (word) target.append(word);
    }
    if (marked) made.append(target);
  }
  return made;
}

export function light(root, name) {
  for (const mark of root.querySelectorAll(`.mark[data-of="${name}"]`)) {
    mark.classList.remove("lit");
    void mark.offsetWidth; // so that the animation starts again
    mark.classList.add("lit");
  }
}

export function shown(x, digits = 3) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e4 || size < 1e-3) return x.toExponential(1).replace("e+", "·10^").replace("e-", "·10^−").replace(/\^(−?)(\d+)/, (_, s, d) => s.replace("−", "⁻") + [...d].map((c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]).join(""));
  return String(+x.toPrecision(digits)).replace("-", "−");
}
