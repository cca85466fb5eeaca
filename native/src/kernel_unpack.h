#pragma once
// Elements packed into fewer bits, as vectors of floats.
#include "simd_shuffles.h"

#define TINYKV_INLINE_MEMBER inline __attribute__((always_inline))

namespace {

// The low kBytes bytes at `from`, and no byte more.
template <int kBytes>
TINYKV_INLINE uint64_t load_bytes(const char* from) {
  static_assert(kBytes >= 1 && kBytes <= 8);
  if constexpr (kBytes == 8) {
    uint64_t x;
    __builtin_memcpy(&x, from, 8);
    return x;
  } else if constexpr (kBytes >= 4) {
    uint32_t x;
    __builtin_memcpy(&x, from, 4);
    if constexpr (kBytes == 4) return x;
    else return x | load_bytes<kBytes - 4>(from + 4) << 32;
  } else if constexpr (kBytes >= 2) {
    uint16_t x;
    __builtin_memcpy(&x, from, 2);
    if constexpr (kBytes == 2) return x;
    else return x | load_bytes<kBytes - 2>(from + 2) << 16;
  } else {
    return (unsigned char)*from;
  }
}

#if defined(__AVX512F__)

// Sixteen elements take 2 * kBits bytes.
template <int kBits>
TINYKV_INLINE Floats unpack(const char* row, int d) {
  const char* from = row + d * kBits / 8;
  if constexpr (kBits == 8) {
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
  } else if constexpr (kBits == 4) {
    // Eight lanes with each of two words
    const __m512i twice = _mm512_set1_epi64((int64_t)load_bytes<8>(from));
    const __m512i words = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), twice);
    const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    return (Floats)_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srlv_epi32(words, shifts), _mm512_set1_epi32(15)));
  } else {
    const __m128i packed = _mm_set_epi64x((int64_t)load_bytes<2 * kBits - 8>(from + 8), (int64_t)load_bytes<8>(from));
    // An element lies in two neighbouring bytes.
    alignas(32) static constexpr struct Places {
      unsigned char bytes[32] = {};
      uint16_t shifts[16] = {};
      constexpr Places() {
        for (int i = 0; i < 16; ++i) {
          bytes[2 * i] = (unsigned char)(i * kBits / 8);
          bytes[2 * i + 1] = (unsigned char)(i * kBits / 8 + 1);
          shifts[i] = (uint16_t)(i * kBits % 8);
        }
      }
    } places;
    const __m256i pairs = _mm256_shuffle_epi8(
        _mm256_broadcastsi128_si256(packed), _mm256_load_si256((const __m256i*)places.bytes));
    const __m256i shifted = _mm256_srlv_epi16(pairs, _mm256_load_si256((const __m256i*)places.shifts));
    const __m256i elements = _mm256_and_si256(shifted, _mm256_set1_epi16((1 << kBits) - 1));
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(elements));
  }
}

#elif defined(__AVX2__)

// Eight elements take kBits bytes.
template <int kBits>
TINYKV_INLINE Floats unpack(const char* row, int d) {
  const char* from = row + d * kBits / 8;
  if constexpr (kBits == 8) {
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
  } else if constexpr (kBits == 4) {
    const __m256i words = _mm256_set1_epi32((int32_t)load_bytes<4>(from));
    const __m256i shifted = _mm256_srlv_epi32(words, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    return (Floats)_mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(15)));
  } else {
    alignas(32) static constexpr struct Places {
      unsigned char bytes[16] = {};
      int32_t shifts[8] = {};
      constexpr Places() {
        for (int i = 0; i < 8; ++i) {
          bytes[2 * i] = (unsigned char)(i * kBits / 8);
          bytes[2 * i + 1] = (unsigned char)(i * kBits / 8 + 1);
          shifts[i] = i * kBits % 8;
        }
      }
    } places;
    const __m128i packed = _mm_cvtsi64_si128((int64_t)load_bytes<kBits>(from));
    const __m128i pairs = _mm_shuffle_epi8(packed, _mm_loadu_si128((const __m128i*)places.bytes));
    const __m256i shifted =
        _mm256_srlv_epi32(_mm256_cvtepu16_epi32(pairs), _mm256_loadu_si256((const __m256i*)places.shifts));
    return (Floats)_mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32((1 << kBits) - 1)));
  }
}

#else

// Four elements take at most 4 bytes, and may start inside one: with 5 bits they end in it.
template <int kBits>
TINYKV_INLINE Floats unpack(const char* row, int d) {
  const uint32_t packed =
      (uint32_t)load_bytes<(4 * kBits + 7) / 8>(row + d * kBits / 8) >> (kBits == 5 ? d * kBits % 8 : 0);
  const Bits shifts = {0, kBits, 2 * kBits, 3 * kBits};
  const Bits words = packed - Bits{};
  return __builtin_convertvector((Ints)((words >> shifts) & ((1u << kBits) - 1)), Floats);
}

#endif

}  // namespace
