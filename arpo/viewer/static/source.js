// Requests: to the server or, in an exported file, to the element `data` of the page.

const embedded = readEmbedded();

export const exported = embedded !== null;

export async function get(path) {
  if (embedded) {
    const found = embedded.get(canonical(path));
    if (found === undefined) throw new Error("This exported page does not hold that part of the run.");
    return found;
  }
  const reply = await reach(path, { cache: "no-store" });
  let body;
  try {
    body = await reply.json();
  } catch {
    throw new Error(`The server's answer to ${path} cannot be read (status ${reply.status}).`);
  }
  if (!reply.ok) throw new Error(body?.error ?? `The server refused ${path} (status ${reply.status}).`);
  return body;
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch {
    throw new Error("The server does not answer; is `arpo view` still running?");
  }
}

// Sends JSON, and calls `receive` with each line of the reply as it comes.
export async function postLines(path, body, { token, signal, receive }) {
  const headers = { "Content-Type": "application/json", "X-Arpo-Token": token };
  const reply = await reach(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!reply.ok) throw new Error((await reply.json()).error);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) receive(JSON.parse(line));
  }
}

export function api(name, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null);
  const query = given.map(([key, value]) => `${key}=${encodeURIComponent(String(value).toWellFormed())}`).join("&");
  return `/api/${name}${query ? `?${query}` : ""}`;
}

// The address of an image in the trees of a run or an evaluation; null if an exported page does not hold it.
export function imageUrl(origin, sha256) {
  const path = api("image", { run: origin.run, eval: origin.eval, sha256 });
  if (!embedded) return path;
  const found = embedded.get(canonical(path));
  return found === undefined ? null : `data:image/png;base64,${found}`;
}

function canonical(path) {
  const url = new URL(path, "http://page");
  const pairs = [...url.searchParams].filter(([key]) => key !== "after").sort(([a], [b]) => (a < b ? -1 : 1));
  return JSON.stringify([url.pathname, pairs]);
}

function readEmbedded() {
  const element = document.getElementById("data");
  if (!element) return null;
  return new Map(Object.entries(JSON.parse(element.textContent)).map(([path, value]) => [canonical(path), value]));
}
