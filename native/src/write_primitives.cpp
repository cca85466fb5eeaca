// The graph nodes that change pages in place.
#include <stdexcept>

#include "mlx/ops.h"
#include "primitive_inputs.h"

namespace tinykv {
namespace {

// Inputs: keys and values pages, slot_mapping, new keys, new values, [what must come first].
class WritePages : public CpuPrimitive {
 public:
  WritePages(mx::Stream stream, bool checked) : CpuPrimitive(stream), checked_(checked) {}
  const char* name() const override { return "WritePages"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate_token(outputs[0]);
    const PageArray keys = page_array(inputs[0]), values = page_array(inputs[1]);
    const int32_t* slots = inputs[2].data<int32_t>();
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.dispatch([keys, values, slots, checked = checked_, key_tokens = tokens(inputs[3]),
                      value_tokens = tokens(inputs[4])] {
      if (!checked) check_slots(keys, slots, key_tokens.batch, key_tokens.tokens);
      write_tokens(keys, key_tokens, slots);
      write_tokens(values, value_tokens, slots);
    });
  }

 private:
  static Tokens tokens(const mx::array& x) {
    Tokens tokens;
    tokens.data = x.data<char>();
    tokens.batch = x.shape(0);
    tokens.tokens = x.shape(2);
    std::copy_n(x.strides().begin(), 4, tokens.strides);
    return tokens;
  }

  bool checked_;
};

// Inputs: keys and values pages, [what must come first].
class CopyPages : public CpuPrimitive {
 public:
  CopyPages(mx::Stream stream, std::vector<int> sources, std::vector<int> targets)
      : CpuPrimitive(stream), sources_(std::move(sources)), targets_(std::move(targets)) {}
  const char* name() const override { return "CopyPages"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate_token(outputs[0]);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const PageArray keys = page_array(inputs[0]), values = page_array(inputs[1]);
    encoder.dispatch([keys, values, sources = sources_, targets = targets_] {
      copy_pages(keys, sources, targets);
      copy_pages(values, sources, targets);
    });
  }

 private:
  std::vector<int> sources_;
  std::vector<int> targets_;
};

mx::array token_of(std::shared_ptr<mx::Primitive> primitive, std::vector<mx::array> inputs, const Pages& pages) {
  add_pending(inputs, pages.written, pages.last_read);
  return mx::array(token_shape(), token_dtype(), std::move(primitive), std::move(inputs));
}

// A PageArray without its address, for checks while the graph is built.
PageArray shape_only(const mx::array& pages) {
  PageArray array;
  array.num_pages = pages.shape(0);
  array.page_size = pages.shape(2);
  return array;
}

}  // namespace

mx::array write_pages(
    const Pages& pages, const mx::array& slot_mapping, const mx::array& keys, const mx::array& values) {
  check_shapes("write_pages", pages);
  const auto& shape = pages.keys.shape();
  if (keys.ndim() != 4 || values.ndim() != 4 || keys.shape(1) != shape[1] || keys.shape(3) != shape[3] ||
      values.shape(3) != pages.values.shape(3) ||
      !std::equal(keys.shape().begin(), keys.shape().begin() + 3, values.shape().begin()) ||
      slot_mapping.shape() != mx::Shape{keys.shape(0), keys.shape(2)})
    throw std::invalid_argument(
        "write_pages: keys " + text_of(keys.shape()) + ", values " + text_of(values.shape()) + " and slot_mapping " +
        text_of(slot_mapping.shape()) + " must be (batch, kv_heads, tokens, head_dim) twice and (batch, tokens), for " +
        "key pages " + text_of(shape) + " and value pages " + text_of(pages.values.shape()));
  const mx::Stream stream = cpu_stream();
  const mx::array slots = contiguous_as(slot_mapping, mx::int32, stream);
  const bool checked = known(slots);
  if (checked) check_slots(shape_only(pages.keys), slots.data<int32_t>(), keys.shape(0), keys.shape(2));
  return token_of(std::make_shared<WritePages>(stream, checked),
                  {pages.keys, pages.values, slots, mx::astype(keys, pages.keys.dtype(), stream),
                   mx::astype(values, pages.values.dtype(), stream)},
                  pages);
}

mx::array copy_pages(const Pages& pages, std::vector<int> sources, std::vector<int> targets) {
  check_shapes("copy_pages", pages);
  if (sources.size() != targets.size())
    throw std::invalid_argument("copy_pages: " + std::to_string(sources.size()) + " sources, but " +
                                std::to_string(targets.size()) + " targets");
  check_pages(shape_only(pages.keys), sources);
  check_pages(shape_only(pages.keys), targets);
  return token_of(std::make_shared<CopyPages>(cpu_stream(), std::move(sources), std::move(targets)),
                  {pages.keys, pages.values}, pages);
}

}  // namespace tinykv
