#pragma once
// Tokens' rows as vectors of floats, however the pages store them.
#include "kernel_unpack.h"

namespace {

using tinykv::Dtype;
using tinykv::Format;

// Elements of type T.
template <class T>
struct Plain {
  const char* const* rows;

  TINYKV_INLINE_MEMBER Floats at(int token, int d) const { return load((const T*)rows[token] + d); }
  TINYKV_INLINE_MEMBER Floats tail(int token, int d) const { return load_tail((const T*)rows[token] + d); }
  TINYKV_INLINE_MEMBER Plain from(int token) const { return {rows + token}; }

  // Fetches the cache line of `row` that begins with element `d`, if one does.
  static TINYKV_INLINE_MEMBER void prefetch(const char* row, int d) {
    constexpr int kLine = 64 / sizeof(T);
    if (d % kLine == 0) __builtin_prefetch(row + d * sizeof(T), 0, 2);
  }
};

// Elements of kBits bits; `affine` has each token's scales and biases as floats, see read_affine(). Their number is a
// multiple of kLeastGroup, so there is no tail.
template <int kBits>
struct Packed {
  const char* const* rows;
  const float* affine;
  int groups;
  int shift;  // log2 of the group size

  TINYKV_INLINE_MEMBER Floats at(int token, int d) const {
    const float* scale = affine + token * 2 * groups + (d >> shift);
    return unpack<kBits>(rows[token], d) * scale[0] + scale[groups];
  }
  TINYKV_INLINE_MEMBER Floats tail(int token, int d) const { return at(token, d); }
  TINYKV_INLINE_MEMBER Packed from(int token) const { return {rows + token, affine + token * 2 * groups, groups, shift}; }

  static TINYKV_INLINE_MEMBER void prefetch(const char* row, int d) {
    if (d * kBits / 8 % 64 == 0) __builtin_prefetch(row + d * kBits / 8, 0, 2);
  }
};

template <class T>
TINYKV_INLINE void read_affine_as(const Format& format, const char* const* rows, int tokens, int dim, float* to) {
  const int count = 2 * (dim / format.group_size);
  const size_t start = format.packed_bytes(dim);
  for (int t = 0; t < tokens; ++t, to += count) {
    for (int i = 0; i < count; i += kLanes) {
      const int left = count - i < kLanes ? count - i : kLanes;
      T from[kLanes] = {};
      float lanes[kLanes];
      __builtin_memcpy(from, rows[t] + start + i * sizeof(T), left * sizeof(T));
      store(lanes, load(from));
      for (int j = 0; j < left; ++j) to[i + j] = lanes[j];
    }
  }
}

// Scales, then biases, of each token of a block, as floats: 2 * dim / group_size of them a token.
void read_affine(const Format& format, const char* const* rows, int tokens, int dim, float* to) {
  if (format.dtype == Dtype::float32) read_affine_as<float>(format, rows, tokens, dim, to);
  else if (format.dtype == Dtype::bfloat16) read_affine_as<Bfloat16>(format, rows, tokens, dim, to);
  else read_affine_as<Float16>(format, rows, tokens, dim, to);
}

// Floats that read_affine() writes at most.
constexpr size_t affine_floats(int dim) {
  return (size_t)tinykv::kBlock * 2 * (dim / tinykv::kLeastGroup);
}

template <int kBits, class Body>
TINYKV_INLINE void with_packed(
    const Format& format, const char* const* rows, int dim, const float* affine, const Body& body) {
  body(Packed<kBits>{rows, affine, dim / format.group_size, __builtin_ctz(format.group_size)});
}

// Calls body(Plain or Packed) for the rows of a block; `affine` is room for read_affine().
template <class Body>
TINYKV_INLINE void with_tokens(
    const Format& format, const char* const* rows, int tokens, int dim, float* affine, const Body& body) {
  if (format.bits != 0) read_affine(format, rows, tokens, dim, affine);
  switch (format.bits) {
    case 0:
      if (format.dtype == Dtype::float32) body(Plain<float>{rows});
      else if (format.dtype == Dtype::bfloat16) body(Plain<Bfloat16>{rows});
      else body(Plain<Float16>{rows});
      return;
    case 4: return with_packed<4>(format, rows, dim, affine, body);
    case 5: return with_packed<5>(format, rows, dim, affine, body);
    case 6: return with_packed<6>(format, rows, dim, affine, body);
    default: return with_packed<8>(format, rows, dim, affine, body);
  }
}

}  // namespace
