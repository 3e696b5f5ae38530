// A scene's state and its link: #line?alpha=-2&points=0.5_1;0.7_1.2. What has its default is left out.

export function defaults(fields) {
  return Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, structuredClone(field.default)]));
}

const short = (x) => String(+Number(x).toFixed(3));

function write(field, value) {
  if (field.kind === "points") return value.map((row) => row.map(short).join("_")).join(";");
  if (field.kind === "flag") return value ? "1" : "0";
  return field.kind === "number" ? short(value) : value;
}

function read(field, text) {
  if (field.kind === "points") return text.split(";").filter(Boolean).map((row) => row.split("_").map(Number));
  if (field.kind === "flag") return { 1: true, 0: false }[text] ?? text;
  return field.kind === "number" && text !== "" ? Number(text) : text;
}

export function encode(scene, state) {
  const parts = Object.entries(scene.fields)
    .filter(([name, field]) => write(field, state[name]) !== write(field, field.default))
    .map(([name, field]) => `${name}=${encodeURIComponent(write(field, state[name])).replaceAll("%3B", ";")}`);
  return `#${scene.name}${parts.length ? "?" + parts.join("&") : ""}`;
}

// The name of the scene and its state. Wrong values stay as they are: the server says what is wrong with them.
export function decode(scenes, hash, first) {
  const [name, rest = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const scene = scenes[name] ?? scenes[first];
  const state = defaults(scene.fields);
  if (!(name in scenes)) return { scene, state };
  for (const part of rest.split("&").filter(Boolean)) {
    const [key, value = ""] = part.split(/=(.*)/s);
    let text = value;
    try { text = decodeURIComponent(value); } catch { /* told by the server */ }
    state[key] = key in scene.fields ? read(scene.fields[key], text) : text;
  }
  return { scene, state };
}
