// The graph node of attention over pages.
#include <algorithm>
#include <stdexcept>

#include "mlx/ops.h"
#include "primitive_inputs.h"

namespace tinykv {
namespace {

constexpr const char* kName = "paged attention";

// Inputs: queries, keys, values, block_table, context_lens, query_lens, [row_starts], [mask], [sinks], [what must come
// first].
class PagedAttention : public CpuPrimitive {
 public:
  PagedAttention(mx::Stream stream, const AttentionOptions& options, bool starts, MaskKind mask, bool sinks, bool checked)
      : CpuPrimitive(stream), options_(options), starts_(starts), mask_(mask), sinks_(sinks), checked_(checked) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "PagedAttention"; }

  Attention describe(const std::vector<mx::array>& inputs) const;

 private:
  int mask_input() const { return starts_ ? 7 : 6; }

  AttentionOptions options_;
  bool starts_;
  MaskKind mask_;
  bool sinks_;
  bool checked_;
};

Attention PagedAttention::describe(const std::vector<mx::array>& inputs) const {
  const mx::array &queries = inputs[0], &keys = inputs[1], &values = inputs[2], &table = inputs[3];
  Attention attention;
  attention.batch = queries.shape(0);
  attention.query_heads = queries.shape(1);
  attention.query_len = queries.shape(2);
  attention.key_dim = queries.shape(3);
  attention.dtype = dtype_of(kName, queries);
  attention.num_pages = keys.shape(0);
  attention.kv_heads = keys.shape(1);
  attention.page_size = keys.shape(2);
  attention.value_dim = dim_of(values, options_.values);
  attention.keys = keys.data<char>();
  attention.key_format = format_of(kName, keys, options_.keys);
  attention.values = values.data<char>();
  attention.value_format = format_of(kName, values, options_.values);
  attention.table_width = table.shape(-1);
  if (starts_) attention.row_starts = inputs[6].data<int32_t>();
  attention.block_table = table.data<int32_t>();
  attention.context_lens = inputs[4].data<int32_t>();
  attention.query_lens = inputs[5].data<int32_t>();
  attention.scale = options_.scale;
  attention.causal = options_.causal;
  attention.window = options_.window;
  attention.keep = options_.keep;
  attention.softcap = options_.softcap;
  attention.mask = mask_;
  if (mask_ != MaskKind::none) attention.mask_positions = inputs[mask_input()].shape(3);
  return attention;
}

void PagedAttention::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  mx::array& out = outputs[0];
  out.set_data(mx::allocator::malloc(out.nbytes()));
  allocate_token(outputs[1]);

  Attention attention = describe(inputs);
  attention.out = out.data<char>();
  attention.queries = inputs[0].data<char>();
  std::copy_n(inputs[0].strides().begin(), 4, attention.query_strides);
  if (mask_ != MaskKind::none) {
    attention.mask_data = inputs[mask_input()].data<char>();
    std::copy_n(inputs[mask_input()].strides().begin(), 4, attention.mask_strides);
  }
  if (sinks_) attention.sinks = inputs[mask_input() + (mask_ == MaskKind::none ? 0 : 1)].data<float>();

  auto& encoder = mx::cpu::get_command_encoder(stream());
  encoder.dispatch([attention, checked = checked_] {
    if (!checked) check(attention);
    run(attention);
  });
}

void check_arguments(const Pages& pages, const mx::array& queries, const mx::array& block_table,
                     const mx::array& context_lens, const mx::array& query_lens,
                     const std::optional<mx::array>& row_starts, const AttentionOptions& options) {
  check_shapes(kName, pages);
  auto refuse = [&](const std::string& what) {
    throw std::invalid_argument(std::string(kName) + ": " + what + " (queries " + text_of(queries.shape()) +
                                ", key pages " + text_of(pages.keys.shape()) + ", value pages " +
                                text_of(pages.values.shape()) + ", block_table " + text_of(block_table.shape()) +
                                ", context_lens " + text_of(context_lens.shape()) + ", query_lens " +
                                text_of(query_lens.shape()) + ")");
  };
  if (queries.ndim() != 4) refuse("queries must be (batch, query_heads, tokens, head_dim)");
  format_of(kName, pages.keys, options.keys);
  format_of(kName, pages.values, options.values);
  const int key_dim = dim_of(pages.keys, options.keys), value_dim = dim_of(pages.values, options.values);
  if (queries.shape(3) != key_dim) refuse("queries and keys must have the same head_dim");
  if (key_dim % 8 != 0 || value_dim % 8 != 0) refuse("head_dim must be a multiple of 8");
  if (queries.shape(1) % pages.keys.shape(1) != 0) refuse("query heads must be a multiple of kv heads");
  const int batch = queries.shape(0);
  if (row_starts) {
    if (block_table.ndim() != 1) refuse("with row_starts block_table must be (page_ids,)");
    if (row_starts->ndim() != 1 || row_starts->shape(0) != batch)
      refuse("row_starts " + text_of(row_starts->shape()) + " must be (batch,)");
  } else if (block_table.ndim() != 2 || block_table.shape(0) != batch) {
    refuse("block_table must be (batch, max_pages)");
  }
  if (context_lens.ndim() != 1 || context_lens.shape(0) != batch || query_lens.shape() != context_lens.shape())
    refuse("context_lens and query_lens must be (batch,)");
  if (options.window < 0 || options.keep < 0 || (options.window > 0 && options.keep >= options.window))
    refuse("window=" + std::to_string(options.window) + " must be positive and more than keep=" +
           std::to_string(options.keep));
}

}  // namespace

std::pair<mx::array, mx::array> attend(
    const Pages& pages, const mx::array& queries, const mx::array& block_table, const mx::array& context_lens,
    const mx::array& query_lens, const std::optional<mx::array>& row_starts, const std::optional<mx::array>& mask,
    const std::optional<mx::array>& sinks, const AttentionOptions& options) {
  check_arguments(pages, queries, block_table, context_lens, query_lens, row_starts, options);
  const mx::Stream stream = cpu_stream();
  std::vector<mx::array> inputs = {
      queries,
      pages.keys,
      pages.values,
      contiguous_as(block_table, mx::int32, stream),
      contiguous_as(context_lens, mx::int32, stream),
      contiguous_as(query_lens, mx::int32, stream),
  };
  if (row_starts) inputs.push_back(contiguous_as(*row_starts, mx::int32, stream));
  const bool known_rows = std::all_of(inputs.begin() + 3, inputs.end(), known);
  MaskKind kind = MaskKind::none;
  if (mask) {
    kind = mask->dtype() == mx::bool_ ? MaskKind::boolean : MaskKind::additive;
    const mx::Shape full = {queries.shape(0), queries.shape(1), queries.shape(2), mask->shape(-1)};
    const mx::array typed = kind == MaskKind::boolean ? *mask : mx::astype(*mask, mx::float32, stream);
    inputs.push_back(mx::broadcast_to(typed, full, stream));
  }
  if (sinks) {
    if (sinks->ndim() != 1 || sinks->shape(0) != queries.shape(1))
      throw std::invalid_argument(std::string(kName) + ": sinks " + text_of(sinks->shape()) +
                                  " must be one per head of queries " + text_of(queries.shape()));
    inputs.push_back(contiguous_as(*sinks, mx::float32, stream));
  }

  auto primitive = std::make_shared<PagedAttention>(stream, options, bool(row_starts), kind, bool(sinks), known_rows);
  if (known_rows) check(primitive->describe(inputs));
  add_pending(inputs, pages.written, pages.last_read);
  mx::Shape shape = queries.shape();
  shape[3] = dim_of(pages.values, options.values);
  auto outputs = mx::array::make_arrays({shape, token_shape()}, {queries.dtype(), token_dtype()}, primitive, inputs);
  return {outputs[0], outputs[1]};
}

}  // namespace tinykv
