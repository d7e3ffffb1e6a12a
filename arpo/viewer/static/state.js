// The state of the page, in the address after "#", so that it can be shared and the back button works.

const LISTS = ["run", "only", "more"];

export function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  const state = Object.fromEntries([...given].filter(([key]) => !LISTS.includes(key)));
  for (const key of LISTS) state[key] = given.getAll(key);
  return state;
}

export function go(changes, { replace = false } = {}) {
  const state = { ...readState(), ...changes };
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) {
    const values = Array.isArray(value) ? value : [value];
    for (const one of values) if (one !== undefined && one !== null && one !== "") query.append(key, String(one));
  }
  const hash = `#${query}`;
  if (hash === location.hash) return;
  if (replace) history.replaceState(null, "", hash);
  else history.pushState(null, "", hash);
  window.dispatchEvent(new Event("hashchange"));
}

export function parseIndex(text, fallback = null) {
  return /^\d{1,12}$/.test(text ?? "") ? Number(text) : fallback;
}
