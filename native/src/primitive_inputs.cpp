#include "primitive_inputs.h"

#include <sstream>
#include <stdexcept>

#include "mlx/ops.h"

namespace tinykv {

void CpuPrimitive::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::runtime_error(std::string(name()) + " runs on the CPU only");
}

mx::Stream cpu_stream() {
  return mx::default_stream(mx::Device(mx::Device::cpu));
}

bool known(const mx::array& x) {
  return !x.is_tracer() && x.is_available();
}

mx::array contiguous_as(const mx::array& x, mx::Dtype dtype, mx::Stream stream) {
  if (x.dtype() == dtype && known(x) && x.flags().row_contiguous) return x;
  return mx::contiguous(mx::astype(x, dtype, stream), false, stream);
}

void add_pending(std::vector<mx::array>& inputs, const std::optional<mx::array>& first,
                 const std::optional<mx::array>& second) {
  for (const auto* token : {&first, &second})
    if (*token && !known(**token)) inputs.push_back(**token);
}

void check_shapes(const char* operation, const Pages& pages) {
  const auto& keys = pages.keys.shape();
  const auto& values = pages.values.shape();
  if (keys.size() == 4 && values.size() == 4 && std::equal(keys.begin(), keys.begin() + 3, values.begin())) return;
  throw std::invalid_argument(
      std::string(operation) + ": key pages " + text_of(keys) + " and value pages " + text_of(values) +
      " must be (num_pages, kv_heads, page_size, head_dim) and differ in head_dim only");
}

PageArray page_array(const mx::array& pages) {
  PageArray array;
  array.data = const_cast<char*>(pages.data<char>());
  array.num_pages = pages.shape(0);
  array.kv_heads = pages.shape(1);
  array.page_size = pages.shape(2);
  array.dim = pages.shape(3);
  array.item_bytes = int(pages.itemsize());
  return array;
}

Dtype dtype_of(const char* operation, const mx::array& x) {
  return dtype_of(operation, x.dtype(), x.shape());
}

Dtype dtype_of(const char* operation, mx::Dtype dtype, const mx::Shape& shape) {
  if (dtype == mx::float32) return Dtype::float32;
  if (dtype == mx::bfloat16) return Dtype::bfloat16;
  if (dtype == mx::float16) return Dtype::float16;
  std::ostringstream text;
  text << operation << ": " << dtype << " " << text_of(shape) << " isn't float32, bfloat16 or float16";
  throw std::invalid_argument(text.str());
}

int dim_of(const mx::array& pages, const Packing& packing) {
  return packing.bits == 0 ? pages.shape(3) : packing.dim;
}

Format format_of(const char* operation, const mx::array& pages, const Packing& packing) {
  if (packing.bits == 0) return {dtype_of(operation, pages)};
  const Format format{dtype_of(operation, packing.dtype, pages.shape()), packing.bits, packing.group_size};
  const bool known_bits = packing.bits == 4 || packing.bits == 5 || packing.bits == 6 || packing.bits == 8;
  const bool known_group = packing.group_size == 32 || packing.group_size == 64 || packing.group_size == 128;
  if (known_bits && known_group && packing.dim > 0 && packing.dim % packing.group_size == 0 &&
      pages.dtype() == mx::uint32 && format.row_bytes(packing.dim) == pages.shape(3) * sizeof(uint32_t))
    return format;
  std::ostringstream text;
  text << operation << ": pages " << text_of(pages.shape()) << " of " << pages.dtype() << " don't hold rows of "
       << packing.dim << " elements of " << packing.bits << " bits in groups of " << packing.group_size << " with "
       << packing.dtype << " scales";
  throw std::invalid_argument(text.str());
}

std::string text_of(const mx::Shape& shape) {
  std::ostringstream text;
  text << shape;
  return text.str();
}

mx::Shape token_shape() {
  return {1};
}

mx::Dtype token_dtype() {
  return mx::int32;
}

void allocate_token(mx::array& token) {
  token.set_data(mx::allocator::malloc(token.nbytes()));
  *token.data<int32_t>() = 0;
}

}  // namespace tinykv
