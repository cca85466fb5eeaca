#pragma once
// Scores of query rows against one block of tokens: scores[row][token] = queries[row] . keys[token].
#include "kernel_loops.h"

namespace {

// kRows rows against kTokens tokens, straight from the pages.
template <int kRows, int kTokens, bool kPrefetch, class Keys>
TINYKV_INLINE void score_tile(
    const float* queries, int dim, const Keys& keys, const char* const* next, float* scores) {
  Floats sums[kRows][kTokens] = {};
  const int stride = tinykv::padded(dim), whole = dim / kLanes * kLanes;
  for (int d = 0; d < whole; d += kLanes) {
    Floats key[kTokens];
    TINYKV_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      key[t] = keys.at(t, d);
      if (kPrefetch) Keys::prefetch(next[t], d);
    }
    TINYKV_UNROLL
    for (int r = 0; r < kRows; ++r) {
      Floats query = load(queries + r * stride + d);
      TINYKV_UNROLL
      for (int t = 0; t < kTokens; ++t) sums[r][t] += query * key[t];
    }
  }
  if (kLanes > 8 && whole < dim) {
    TINYKV_UNROLL
    for (int r = 0; r < kRows; ++r) {
      Floats query = load(queries + r * stride + whole);
      TINYKV_UNROLL
      for (int t = 0; t < kTokens; ++t) sums[r][t] += query * keys.tail(t, whole);
    }
  }
  TINYKV_UNROLL
  for (int r = 0; r < kRows; ++r) {
    float* row = scores + r * tinykv::kBlock;
    if constexpr (kTokens == 1) {
      row[0] = sum(sums[r][0]);
    } else {
      TINYKV_UNROLL
      for (int t = 0; t < kTokens; t += 4)
        store_sums(row + t, sums[r][t], sums[r][t + 1], sums[r][t + 2], sums[r][t + 3]);
    }
  }
}

template <int kRows, bool kPrefetch, class Keys>
TINYKV_INLINE void score_rows(
    const float* queries, int dim, const Keys& keys, const char* const* next, int tokens, float* scores) {
  // One row alone needs more tokens in flight to hide the latency of its sums.
  constexpr int kTokens = kRows == 1 ? 8 : 4;
  int t = 0;
  for (; t + kTokens <= tokens; t += kTokens)
    score_tile<kRows, kTokens, kPrefetch>(queries, dim, keys.from(t), next + t, scores + t);
  for (; t < tokens; ++t) score_tile<kRows, 1, kPrefetch>(queries, dim, keys.from(t), next + t, scores + t);
}

// Few rows: keys are read from the pages for each kScoreRows of them, and `next` is fetched meanwhile.
template <class Keys>
void score_few(
    const float* queries, int rows, int dim, const Keys& keys, const char* const* next, int tokens, float* scores) {
  const int stride = tinykv::padded(dim);
  for_few_rows<kScoreRows>(rows, [&](int r, auto count, auto prefetch) {
    score_rows<count.value, prefetch.value>(
        queries + r * stride, dim, keys, next, tokens, scores + r * tinykv::kBlock);
  });
}

// Keys of a block as columns of floats: to[d][token], zeros beyond `tokens`.
template <class Keys>
void transpose_keys(const Keys& keys, int tokens, int dim, float* to) {
  for (int t = 0; t < tokens; t += kLanes) {
    for (int d = 0; d < dim; d += kLanes) {
      Floats square[kLanes];
      const bool whole = d + kLanes <= dim;
      for (int i = 0; i < kLanes; ++i) {
        if (t + i >= tokens) square[i] = Floats{};
        else square[i] = whole ? keys.at(t + i, d) : keys.tail(t + i, d);
      }
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(to + (d + i) * tinykv::kBlock + t, square[i]);
    }
  }
}

// kRows rows against kTileVectors vectors of transposed keys.
template <int kRows>
TINYKV_INLINE void score_columns_tile(const float* queries, int dim, const float* columns, float* scores) {
  Floats sums[kRows][kTileVectors] = {};
  const int stride = tinykv::padded(dim);
  for (int d = 0; d < dim; ++d) {
    Floats key[kTileVectors];
    TINYKV_UNROLL
    for (int v = 0; v < kTileVectors; ++v) key[v] = load(columns + d * tinykv::kBlock + v * kLanes);
    TINYKV_UNROLL
    for (int r = 0; r < kRows; ++r) {
      Floats query = splat(queries[r * stride + d]);
      TINYKV_UNROLL
      for (int v = 0; v < kTileVectors; ++v) sums[r][v] += query * key[v];
    }
  }
  TINYKV_UNROLL
  for (int r = 0; r < kRows; ++r)
    TINYKV_UNROLL
    for (int v = 0; v < kTileVectors; ++v) store(scores + r * tinykv::kBlock + v * kLanes, sums[r][v]);
}

// Many rows: against keys that were transposed once for all of them.
void score_columns(const float* queries, int rows, int dim, const float* columns, int tokens, float* scores) {
  constexpr int kStep = kTileVectors * kLanes;
  const int stride = tinykv::padded(dim);
  for (int t = 0; t < tokens; t += kStep)
    for_many_rows(rows, [&](int r, auto count) {
      score_columns_tile<count.value>(
          queries + (size_t)r * stride, dim, columns + t, scores + (size_t)r * tinykv::kBlock + t);
    });
}

}  // namespace
