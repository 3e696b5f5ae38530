// The controls of a scene, from the same table of fields by which the server checks a state.

import { element, shown } from "./dom.js";

export function valueText(field, value) {
  const low = value <= field.low + 1e-9, high = value >= field.high - 1e-9;
  if (low && field.ends[0]) return field.ends[0];
  if (high && field.ends[1]) return field.ends[1];
  return shown(field.power ? 10 ** value : value, 2);
}

export function controls(fields, state, change) {
  const root = element("div", { class: "fields" }), refresh = [];
  for (const [name, field] of Object.entries(fields)) {
    const made = { number, choice, flag }[field.kind]?.(name, field, change);
    if (!made) continue;
    root.append(made.root);
    refresh.push(() => made.show(state[name]));
  }
  return { root, show: () => refresh.forEach((one) => one()) };
}

const note = (field, id) => (field.hint ? element("small", { id: `${id}-hint` }, field.hint) : null);

function number(name, field, change) {
  const id = `field-${name}`, out = element("output", { for: id });
  const input = element("input", {
    type: "range", id, name, min: field.low, max: field.high, step: field.step,
    "aria-describedby": field.hint ? `${id}-hint` : undefined,
    oninput: () => change(name, Number(input.value)),
  });
  const root = element("div", { class: "field" }, element("label", { for: id }, field.label), out, input, note(field, id));
  return { root, show: (value) => {
    input.value = value; out.value = valueText(field, value);
    input.setAttribute("aria-valuetext", out.value);
    input.style.setProperty("--part", `${(100 * (value - field.low)) / (field.high - field.low)}%`);
  } };
}

function choice(name, field, change) {
  const id = `field-${name}`, options = Object.entries(field.options);
  if (options.length > 3) {
    const input = element("select", { id, name, onchange: () => change(name, input.value) },
      ...options.map(([value, text]) => element("option", { value }, text)));
    return { root: element("div", { class: "field" }, element("label", { for: id }, field.label), input, note(field, id)), show: (value) => { input.value = value; } };
  }
  const inputs = options.map(([value]) => element("input", { type: "radio", name, value, id: `${id}-${value}`, onchange: () => change(name, value) }));
  const root = element("fieldset", { class: "field segments" }, element("legend", {}, field.label),
    element("div", {}, ...options.map(([value, text], i) => element("span", { class: `option-${name}-${value}` }, inputs[i], element("label", { for: `${id}-${value}` }, text)))), note(field, id));
  return { root, show: (value) => inputs.forEach((input) => { input.checked = input.value === value; }) };
}

function flag(name, field, change) {
  const id = `field-${name}`;
  const input = element("input", { type: "checkbox", role: "switch", id, name, onchange: () => change(name, input.checked) });
  return { root: element("div", { class: "field switch" }, input, element("label", { for: id }, field.label), note(field, id)), show: (value) => { input.checked = value; } };
}
