// Puts the parts of each query vector together, in order, whoever computed them.
//
// grid: (value dim, query vectors) threads.

const int dim = thread_position_in_grid.x;
const int64_t vector = thread_position_in_grid.y;
const int parts = partial_shape[1];
const int value_dim = partial_shape[2];

float top = -INFINITY;
for (int part = 0; part < parts; part++) {
  top = max(top, stats[2 * (vector * parts + part)]);
}
float sum = 0.0f;
float all = 0.0f;
for (int part = 0; part < parts; part++) {
  const int64_t at = vector * parts + part;
  const float factor = softmax_factor(stats[2 * at], top);
  sum += stats[2 * at + 1] * factor;
  all += partial[at * value_dim + dim] * factor;
}
// Query vectors are in the order (row, query head, query token).
const float sink = SINKS ? float(sinks[vector / QUERIES % sinks_shape[0]]) : 0.0f;
out[vector * value_dim + dim] = static_cast<T>(softmax_finish(all, sum, top, SINKS, sink));
