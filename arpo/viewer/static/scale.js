// Where the y axis of a chart ends.

const USUAL_SHARE = 0.75; // of the weight
const BEYOND = 3;

// The end of an axis that a rare series must not stretch. `high` is what a series needs of the axis, and `weight` says
// how often it occurs. Values are inside up to three times what the lowest series with three quarters of the weight need.
export function robustTop(series) {
  const total = series.reduce((sum, one) => sum + one.weight, 0);
  let weight = 0;
  const usual = series.toSorted((a, b) => a.high - b.high).find((one) => (weight += one.weight) >= USUAL_SHARE * total).high;
  const values = series.flatMap((one) => one.points.map(([, y]) => y)).filter((y) => y !== null && y <= BEYOND * usual);
  return values.reduce((most, y) => Math.max(most, y), 0);
}
