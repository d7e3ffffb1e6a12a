// Requests: to the server or, in an exported file, to the element `data` of the page.

const embedded = readEmbedded();

export const exported = embedded !== null;

export async function get(path) {
  if (embedded) {
    const found = embedded.get(canonical(path));
    if (found === undefined) throw new Error("This exported page does not hold that part of the run.");
    return found;
  }
  let reply;
  try {
    reply = await fetch(path, { cache: "no-store" });
  } catch {
    throw new Error("The server does not answer; is `arpo view` still running?");
  }
  let body;
  try {
    body = await reply.json();
  } catch {
    throw new Error(`The server's answer to ${path} cannot be read (status ${reply.status}).`);
  }
  if (!reply.ok) throw new Error(body?.error ?? `The server refused ${path} (status ${reply.status}).`);
  return body;
}

export function api(name, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null);
  const query = given.map(([key, value]) => `${key}=${encodeURIComponent(String(value).toWellFormed())}`).join("&");
  return `/api/${name}${query ? `?${query}` : ""}`;
}

// The address of an image of a run's trees; null if an exported page does not hold it.
export function imageUrl(run, sha256) {
  const path = api("image", { run, sha256 });
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
