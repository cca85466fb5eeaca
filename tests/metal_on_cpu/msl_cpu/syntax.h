// MSL for clang, to be checked and never run: address spaces are real ones, as only Metal's compiler has them.
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY __builtin_inff()
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef _Float16 half;
typedef _Float16 float16_t;
typedef __bf16 bfloat;
typedef __bf16 bfloat16_t;
typedef uint uint3 __attribute__((ext_vector_type(3)));

namespace metal {
template <class T, int N>
struct vector {
  typedef T type __attribute__((ext_vector_type(N)));
};
template <class T, int N>
using vec = typename vector<T, N>::type;

#define MSL_ONE(name) \
  template <class T>  \
  METAL_FUNC T name(T x) { return x; }
#define MSL_TWO(name) \
  template <class T>  \
  METAL_FUNC T name(T x, T) { return x; }
#define MSL_MATH MSL_ONE(exp) MSL_ONE(exp2) MSL_ONE(log) MSL_ONE(sqrt) MSL_ONE(tanh) MSL_TWO(fmax) MSL_TWO(fmin)
MSL_MATH
namespace fast {
MSL_MATH
}
namespace precise {
MSL_MATH
}
MSL_TWO(max)
MSL_TWO(min)
// Of a simdgroup's values, but not of bfloats: those are mlx's own, where it has them.
#define MSL_SIMD(name) \
  float name(float);   \
  half name(half);     \
  int name(int);       \
  uint name(uint);     \
  bfloat name(bfloat) = delete;
MSL_SIMD(simd_sum)
MSL_SIMD(simd_max)
enum class mem_flags : unsigned { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
}  // namespace metal
namespace msl {
template <class T>
threadgroup T& threadgroup_variable(int, const char*);
}
using namespace metal;
// What MSL doesn't have, and words that it reserves.
#pragma GCC poison double goto throw try catch virtual dynamic_cast typeid thread_local new delete asm
#pragma GCC poison kernel vertex fragment visible mesh object sampler texture1d texture2d texture3d texture_buffer
#pragma GCC poison threadgroup_imageblock ray_data object_data patch_control_point stage_in quadgroup simdgroup_matrix
