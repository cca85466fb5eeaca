#pragma once
// Tokens' rows as vectors of floats, however the pages store them.
#include "kernel_unpack.h"

namespace {

using tinykv::Dtype;
using tinykv::Format;

// Floats of the scales and biases of a block's tokens in one group.
constexpr int kAffineGroup = 2 * tinykv::kBlock;

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

// Elements of kBits bits; `affine` has the tokens' scales and biases as floats, see read_affine(). A row's elements are
// a multiple of kLeastGroup, so there is no tail.
template <int kBits>
struct Packed {
  const char* const* rows;
  const float* affine;
  int shift;  // log2 of the group size

  TINYKV_INLINE_MEMBER Floats at(int token, int d) const {
    const float* scale = affine + (d >> shift) * kAffineGroup + 2 * token;
    return unpack<kBits>(rows[token], d) * scale[0] + scale[1];
  }
  TINYKV_INLINE_MEMBER Floats tail(int token, int d) const { return at(token, d); }
  TINYKV_INLINE_MEMBER Packed from(int token) const { return {rows + token, affine + 2 * token, shift}; }

  static TINYKV_INLINE_MEMBER void prefetch(const char* row, int d) {
    if (d * kBits / 8 % 64 == 0) __builtin_prefetch(row + d * kBits / 8, 0, 2);
  }
};

template <class T>
TINYKV_INLINE void read_affine_as(const Format& format, const char* const* rows, int tokens, int dim, float* to) {
  const int groups = dim / format.group_size;
  const size_t start = format.packed_bytes(dim);
  for (int t = 0; t < tokens; ++t) {
    const char* from = rows[t] + start;
    for (int g = 0; g < groups; ++g) {
      T scale, bias;
      __builtin_memcpy(&scale, from + g * sizeof scale, sizeof scale);
      __builtin_memcpy(&bias, from + (groups + g) * sizeof bias, sizeof bias);
      to[g * kAffineGroup + 2 * t] = to_float(scale);
      to[g * kAffineGroup + 2 * t + 1] = to_float(bias);
    }
  }
}

// The scale and the bias of each token of a block as floats, group after group.
void read_affine(const Format& format, const char* const* rows, int tokens, int dim, float* to) {
  if (format.dtype == Dtype::float32) read_affine_as<float>(format, rows, tokens, dim, to);
  else if (format.dtype == Dtype::bfloat16) read_affine_as<Bfloat16>(format, rows, tokens, dim, to);
  else read_affine_as<Float16>(format, rows, tokens, dim, to);
}

// Floats that read_affine() writes at most.
constexpr size_t affine_floats(int dim) {
  return (size_t)kAffineGroup * (dim / tinykv::kLeastGroup);
}

// Calls body(Plain or Packed) for the rows of a block; `affine` is room for read_affine().
template <class Body>
TINYKV_INLINE void with_tokens(
    const Format& format, const char* const* rows, int tokens, int dim, float* affine, const Body& body) {
  if (format.bits != 0) read_affine(format, rows, tokens, dim, affine);
  const int shift = format.bits != 0 ? __builtin_ctz(format.group_size) : 0;
  switch (format.bits) {
    case 0:
      if (format.dtype == Dtype::float32) body(Plain<float>{rows});
      else if (format.dtype == Dtype::bfloat16) body(Plain<Bfloat16>{rows});
      else body(Plain<Float16>{rows});
      return;
    case 4: return body(Packed<4>{rows, affine, shift});
    case 5: return body(Packed<5>{rows, affine, shift});
    case 6: return body(Packed<6>{rows, affine, shift});
    default: return body(Packed<8>{rows, affine, shift});
  }
}

}  // namespace
