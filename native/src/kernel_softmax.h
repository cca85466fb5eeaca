#pragma once
// The softmax of one block of scores, running over the blocks of a part.
#include "simd.h"

namespace {

constexpr float kLog2e = 1.44269504089f;

// softcap * tanh(score / softcap), of scores in units of log2.
TINYKV_INLINE Floats capped(Floats score, float softcap) {
  Floats twice = score * (2.f / softcap);
  twice = twice > 126.f ? splat(126.f) : twice;
  return (softcap * kLog2e) * (1.f - 2.f / (exp2(twice) + 1.f));
}

// Changes the scores of one row before their softmax: softcap, bias, and -inf where it doesn't see the token.
TINYKV_INLINE void mask_row(float* scores, int tokens, int first, int last, const float* bias, float softcap) {
  if (softcap != 0)
    for (int t = 0; t < tokens; t += kLanes) store(scores + t, capped(load(scores + t), softcap));
  if (bias != nullptr)
    for (int t = 0; t < tokens; ++t) scores[t] += bias[t] * kLog2e;
  for (int t = 0; t < first && t < tokens; ++t) scores[t] = kMinusInfinity;
  for (int t = last > 0 ? last : 0; t < tinykv::kBlock; ++t) scores[t] = kMinusInfinity;
}

// Replaces a row of scores by their weights 2^(score - max), raises `max` and `sum`, and scales `out` to the new max.
TINYKV_INLINE void weigh_row(float* scores, float* max_, float* sum_, float* out, int value_dim) {
  // The largest score so far
  Floats highest = load(scores);
  for (int t = kLanes; t < tinykv::kBlock; t += kLanes) highest = larger(highest, load(scores + t));
  const float block_max = max(highest), old_max = *max_;
  const float new_max = block_max > old_max ? block_max : old_max;
  // Nothing is seen yet: -inf - 0 keeps the weights at zero, -inf - -inf would not.
  const float base = new_max == kMinusInfinity ? 0.f : new_max;

  // Weights and their sum
  Floats total{};
  for (int t = 0; t < tinykv::kBlock; t += kLanes) {
    Floats weight = exp2(load(scores + t) - base);
    store(scores + t, weight);
    total += weight;
  }

  // What was summed up to the old maximum
  if (new_max > old_max) {
    const float factor = exp2(old_max - base);
    for (int d = 0; d < value_dim; d += kLanes) store(out + d, load(out + d) * factor);
    *sum_ *= factor;
    *max_ = new_max;
  }
  *sum_ += sum(total);
}

}  // namespace
