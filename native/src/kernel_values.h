#pragma once
// The weighted sum of one block of values: out[row] += weights[row][token] * values[token].
#include "kernel_loops.h"

namespace {

// kRows rows, kVectors vectors of columns, straight from the pages; `kTail` is for the last 8 columns.
template <int kRows, int kVectors, bool kPrefetch, bool kTail = false, class Values>
TINYKV_INLINE void value_tile(
    const float* weights, const Values& values, const char* const* next, int column, int tokens, float* out,
    int stride) {
  Floats sums[kRows][kVectors];
  TINYKV_UNROLL
  for (int r = 0; r < kRows; ++r)
    TINYKV_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = load(out + r * stride + column + v * kLanes);
  for (int t = 0; t < tokens; ++t) {
    Floats value[kVectors];
    TINYKV_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const int d = column + v * kLanes;
      value[v] = kTail ? values.tail(t, d) : values.at(t, d);
      if (kPrefetch) Values::prefetch(next[t], d);
    }
    TINYKV_UNROLL
    for (int r = 0; r < kRows; ++r) {
      Floats weight = splat(weights[r * tinykv::kBlock + t]);
      TINYKV_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] += weight * value[v];
    }
  }
  TINYKV_UNROLL
  for (int r = 0; r < kRows; ++r)
    TINYKV_UNROLL
    for (int v = 0; v < kVectors; ++v) store(out + r * stride + column + v * kLanes, sums[r][v]);
}

template <int kRows, bool kPrefetch, class Values>
TINYKV_INLINE void value_rows(
    const float* weights, const Values& values, const char* const* next, int tokens, int dim, float* out) {
  constexpr int kVectors = kValueVectors;
  const int stride = tinykv::padded(dim);
  int column = 0;
  // One row alone takes more columns at once to hide the latency of its sums.
  for (; kRows == 1 && column + 2 * kVectors * kLanes <= dim; column += 2 * kVectors * kLanes)
    value_tile<kRows, 2 * kVectors, kPrefetch>(weights, values, next, column, tokens, out, stride);
  for (; column + kVectors * kLanes <= dim; column += kVectors * kLanes)
    value_tile<kRows, kVectors, kPrefetch>(weights, values, next, column, tokens, out, stride);
  for (; column + kLanes <= dim; column += kLanes)
    value_tile<kRows, 1, kPrefetch>(weights, values, next, column, tokens, out, stride);
  if (kLanes > 8 && column < dim)
    value_tile<kRows, 1, kPrefetch, true>(weights, values, next, column, tokens, out, stride);
}

// Few rows: values are read from the pages for each kValueRows of them, and `next` is fetched meanwhile.
template <class Values>
void add_values_few(
    const float* weights, int rows, const Values& values, const char* const* next, int tokens, int dim,
    float* out) {
  const int stride = tinykv::padded(dim);
  for_few_rows<kValueRows>(rows, [&](int r, auto count, auto prefetch) {
    value_rows<count.value, prefetch.value>(
        weights + r * tinykv::kBlock, values, next, tokens, dim, out + r * stride);
  });
}

// Values of a block as rows of floats: to[token][column], zeros in the padding.
template <class Values>
void convert_values(const Values& values, int tokens, int dim, float* to) {
  const int stride = tinykv::padded(dim), whole = dim / kLanes * kLanes;
  for (int t = 0; t < tokens; ++t) {
    for (int d = 0; d < whole; d += kLanes) store(to + t * stride + d, values.at(t, d));
    if (kLanes > 8 && whole < dim) store(to + t * stride + whole, values.tail(t, whole));
  }
}

template <int kRows, int kVectors>
TINYKV_INLINE void value_columns_tile(const float* weights, const float* values, int tokens, int stride, float* out) {
  Floats sums[kRows][kVectors];
  TINYKV_UNROLL
  for (int r = 0; r < kRows; ++r)
    TINYKV_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = load(out + r * stride + v * kLanes);
  for (int t = 0; t < tokens; ++t) {
    Floats value[kVectors];
    TINYKV_UNROLL
    for (int v = 0; v < kVectors; ++v) value[v] = load(values + t * stride + v * kLanes);
    TINYKV_UNROLL
    for (int r = 0; r < kRows; ++r) {
      Floats weight = splat(weights[r * tinykv::kBlock + t]);
      TINYKV_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] += weight * value[v];
    }
  }
  TINYKV_UNROLL
  for (int r = 0; r < kRows; ++r)
    TINYKV_UNROLL
    for (int v = 0; v < kVectors; ++v) store(out + r * stride + v * kLanes, sums[r][v]);
}

template <int kRows>
TINYKV_INLINE void value_columns(const float* weights, const float* values, int tokens, int dim, float* out) {
  constexpr int kStep = kTileVectors * kLanes;
  const int stride = tinykv::padded(dim);
  int column = 0;
  for (; column + kStep <= dim; column += kStep)
    value_columns_tile<kRows, kTileVectors>(weights, values + column, tokens, stride, out + column);
  for (; column < dim; column += kLanes)
    value_columns_tile<kRows, 1>(weights, values + column, tokens, stride, out + column);
}

// Many rows: from values that were converted once for all of them.
void add_values(const float* weights, int rows, const float* values, int tokens, int dim, float* out) {
  const int stride = tinykv::padded(dim);
  for_many_rows(rows, [&](int r, auto count) {
    value_columns<count.value>(
        weights + (size_t)r * tinykv::kBlock, values, tokens, dim, out + (size_t)r * stride);
  });
}

}  // namespace
