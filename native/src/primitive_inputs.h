#pragma once
// What the primitives share: their base, their inputs, and pages as pointers.
#include <string>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "page_io.h"
#include "primitives.h"

namespace tinykv {

class CpuPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
};

// The stream for a primitive: the thread's default one on the CPU.
mx::Stream cpu_stream();

// `x` as a contiguous array of `dtype`; itself where it is known to be one.
mx::array contiguous_as(const mx::array& x, mx::Dtype dtype, mx::Stream stream);

// Adds what isn't done yet of `first` and `second`: a node that has been computed orders nothing.
void add_pending(std::vector<mx::array>& inputs, const std::optional<mx::array>& first,
                 const std::optional<mx::array>& second);

// Whether the values are there to be looked at.
bool known(const mx::array& x);

// Throws std::invalid_argument unless keys and values are pages that belong together.
void check_shapes(const char* operation, const Pages& pages);

PageArray page_array(const mx::array& pages);
Dtype dtype_of(const char* operation, const mx::array& x);
Dtype dtype_of(const char* operation, mx::Dtype dtype, const mx::Shape& shape);

// Elements of a head in pages, and how they are stored. Throws std::invalid_argument unless the pages fit `packing`.
int dim_of(const mx::array& pages, const Packing& packing);
Format format_of(const char* operation, const mx::array& pages, const Packing& packing);
std::string text_of(const mx::Shape& shape);

// A token's shape and dtype, and its memory when it is evaluated.
mx::Shape token_shape();
mx::Dtype token_dtype();
void allocate_token(mx::array& token);

}  // namespace tinykv
