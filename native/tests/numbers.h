#pragma once
// Random numbers in each dtype, and the numbers as double.
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernel_table.h"

namespace test {

inline float half_to_float(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float value;
  if (exponent == 31) value = fraction ? __builtin_nanf("") : __builtin_inff();
  else if (exponent == 0) value = __builtin_ldexpf(float(fraction), -24);
  else value = __builtin_ldexpf(float(1024 + fraction), exponent - 25);
  return bits & 0x8000 ? -value : value;
}

inline double to_double(const char* from, tinykv::Dtype dtype) {
  if (dtype == tinykv::Dtype::float32) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  if (dtype == tinykv::Dtype::float16) return half_to_float(bits);
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// `count` numbers of about normal distribution; the bytes are exactly as long, so that reading beyond is seen.
inline std::vector<char> random_numbers(size_t count, tinykv::Dtype dtype, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<char> numbers(count * size_of(dtype));
  for (size_t i = 0; i < count; ++i) {
    const float value = normal(generator);
    if (dtype == tinykv::Dtype::float32) {
      std::memcpy(&numbers[i * 4], &value, 4);
    } else if (dtype == tinykv::Dtype::bfloat16) {
      std::memcpy(&numbers[i * 2], reinterpret_cast<const char*>(&value) + 2, 2);
    } else {
      // Any half in [-2, 2) will do.
      const uint16_t bits = uint16_t(generator() & 0x8000) | uint16_t(generator() % 0x4000);
      std::memcpy(&numbers[i * 2], &bits, 2);
    }
  }
  return numbers;
}

// Fills with the dtype's NaN.
inline void poison(std::vector<char>& numbers) {
  std::memset(numbers.data(), 0xff, numbers.size());
}

}  // namespace test
