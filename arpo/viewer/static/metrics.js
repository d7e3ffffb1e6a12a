// The records of runs, fetched incrementally, and series of points.

import { api, get } from "./source.js";

const known = new Map();

export function recordsOf(id) {
  return known.get(id)?.records ?? [];
}

export function damagedOf(id) {
  return known.get(id)?.damaged ?? 0;
}

// Fetches a run's new records. A file that was rewritten, by a run that was rolled back, is read from its beginning.
export async function loadMetrics(id) {
  const have = known.get(id) ?? { records: [], next: 0, damaged: 0 };
  let reply = await get(api("metrics", { run: id, after: have.next }));
  if (have.next > 0 && (reply.file !== have.file || reply.next < have.next)) {
    reply = await get(api("metrics", { run: id, after: 0 }));
    Object.assign(have, { records: [], damaged: 0 });
  }
  const damaged = have.damaged + (reply.damaged ?? 0);
  known.set(id, { records: joined(have.records, reply.records), next: reply.next, file: reply.file, damaged });
}

// A resumed run writes steps again: the later record of a step counts, and older records of later steps are dropped.
function joined(records, added) {
  if (!added.length) return records;
  const first = added.reduce((least, record) => Math.min(least, record.step), Infinity);
  return [...records.filter((record) => record.step < first), ...added];
}

export const AXES = [
  ["step", "steps"],
  ["calls", "tool calls"],
  ["time", "wall time"],
];

const FACTORS = [[7200, 3600, "hours"], [120, 60, "minutes"], [0, 1, "seconds"]];

export function axisUnit(axis, lists) {
  if (axis !== "time") return { factor: 1, label: axis === "calls" ? "tool calls" : "step" };
  const longest = Math.max(0, ...lists.map((records) => total(records)));
  const [, factor, label] = FACTORS.find(([from]) => longest >= from);
  return { factor, label };
}

function total(records) {
  return records.reduce((sum, record) => sum + spent(record), 0);
}

function spent(record) {
  return finite(record.rollout_seconds) + finite(record.train_seconds);
}

function finite(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : 0;
}

export function pointsOf(records, name, axis, factor) {
  let calls = 0;
  let time = 0;
  return records.map((record) => {
    calls += finite(record.tool_calls);
    time += spent(record);
    const x = axis === "calls" ? calls : axis === "time" ? time / factor : record.step;
    const y = record[name];
    return [x, typeof y === "number" && Number.isFinite(y) ? y : null];
  });
}

// An exponential mean that is exact at the start: weights of 0.8 per point, made to sum to one.
export function smoothed(points) {
  let sum = 0;
  let weight = 0;
  return points.map(([x, y]) => {
    if (y === null) return [x, null];
    sum = 0.8 * sum + 0.2 * y;
    weight = 0.8 * weight + 0.2;
    return [x, sum / weight];
  });
}
