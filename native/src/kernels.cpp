// Compiled once per instruction set, with TINYKV_ISA as its name.
#include "kernel_attention.h"
#include "kernel_rows.h"

#define TINYKV_JOIN(a, b) a##b
#define TINYKV_NAME(a, b) TINYKV_JOIN(a, b)
#define TINYKV_TEXT_(a) #a
#define TINYKV_TEXT(a) TINYKV_TEXT_(a)

namespace tinykv {

const Kernels* TINYKV_NAME(kernels_, TINYKV_ISA)() {
  static constexpr Kernels kernels = {
      TINYKV_TEXT(TINYKV_ISA), scratch_floats, load_rows, attend_part, merge, store_rows,
  };
  return &kernels;
}

}  // namespace tinykv
