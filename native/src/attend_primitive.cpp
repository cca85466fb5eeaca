// The graph node of attention over pages.
#include <algorithm>
#include <stdexcept>

#include "mlx/ops.h"
#include "primitive_inputs.h"

namespace tinykv {
namespace {

constexpr const char* kName = "paged attention";

// Which optional inputs there are.
struct Given {
  bool starts;
  bool open;
  bool open_starts;
  bool mask;
  bool sinks;
};

// Inputs: queries, context_lens, query_lens, keys, values, block_table, [row_starts], then the same four of open pages
// and full_until if there are any, [mask], [sinks], [what must come first].
class PagedAttention : public CpuPrimitive {
 public:
  PagedAttention(mx::Stream stream, const AttentionOptions& options, const Given& given, MaskKind mask, bool checked)
      : CpuPrimitive(stream), options_(options), given_(given), mask_(mask), checked_(checked) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "PagedAttention"; }

  Attention describe(const std::vector<mx::array>& inputs) const;

 private:
  static constexpr int kRows = 3;
  int open_rows() const { return kRows + 3 + given_.starts; }
  int full_until() const { return open_rows() + 3 + given_.open_starts; }
  int mask_input() const { return given_.open ? full_until() + 1 : open_rows(); }

  AttentionOptions options_;
  Given given_;
  MaskKind mask_;
  bool checked_;
};

// The inputs from `at` on, but for keys and values, which may not have been computed yet.
Store store_of(const std::vector<mx::array>& inputs, int at, bool starts, const Packing& keys, const Packing& values) {
  Store store;
  store.num_pages = inputs[at].shape(0);
  store.key_format = format_of(kName, inputs[at], keys);
  store.value_format = format_of(kName, inputs[at + 1], values);
  store.table_width = inputs[at + 2].shape(-1);
  store.block_table = inputs[at + 2].data<int32_t>();
  if (starts) store.row_starts = inputs[at + 3].data<int32_t>();
  return store;
}

void point(Store& store, const std::vector<mx::array>& inputs, int at) {
  store.keys = inputs[at].data<char>();
  store.values = inputs[at + 1].data<char>();
}

Attention PagedAttention::describe(const std::vector<mx::array>& inputs) const {
  const mx::array &queries = inputs[0], &keys = inputs[kRows], &values = inputs[kRows + 1];
  Attention attention;
  attention.batch = queries.shape(0);
  attention.query_heads = queries.shape(1);
  attention.query_len = queries.shape(2);
  attention.key_dim = queries.shape(3);
  attention.dtype = dtype_of(kName, queries);
  attention.kv_heads = keys.shape(1);
  attention.page_size = keys.shape(2);
  attention.value_dim = dim_of(values, options_.values);
  attention.closed = store_of(inputs, kRows, given_.starts, options_.keys, options_.values);
  attention.opens = given_.open;
  if (given_.open) {
    attention.open = store_of(inputs, open_rows(), given_.open_starts, {}, {});
    attention.full_until = inputs[full_until()].data<int32_t>();
  }
  attention.context_lens = inputs[1].data<int32_t>();
  attention.query_lens = inputs[2].data<int32_t>();
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
  point(attention.closed, inputs, kRows);
  if (given_.open) point(attention.open, inputs, open_rows());
  attention.out = out.data<char>();
  attention.queries = inputs[0].data<char>();
  std::copy_n(inputs[0].strides().begin(), 4, attention.query_strides);
  if (mask_ != MaskKind::none) {
    attention.mask_data = inputs[mask_input()].data<char>();
    std::copy_n(inputs[mask_input()].strides().begin(), 4, attention.mask_strides);
  }
  if (given_.sinks) attention.sinks = inputs[mask_input() + given_.mask].data<float>();

  auto& encoder = mx::cpu::get_command_encoder(stream());
  encoder.dispatch([attention, checked = checked_] {
    if (!checked) check(attention);
    run(attention);
  });
}

void check_rows(const Rows& rows, const mx::array& queries, const Packing& keys, const Packing& values) {
  const Pages& pages = rows.pages;
  const mx::array& block_table = rows.block_table;
  check_shapes(kName, pages);
  auto refuse = [&](const std::string& what) {
    throw std::invalid_argument(std::string(kName) + ": " + what + " (queries " + text_of(queries.shape()) +
                                ", key pages " + text_of(pages.keys.shape()) + ", value pages " +
                                text_of(pages.values.shape()) + ", block_table " + text_of(block_table.shape()) + ")");
  };
  format_of(kName, pages.keys, keys);
  format_of(kName, pages.values, values);
  const int key_dim = dim_of(pages.keys, keys), value_dim = dim_of(pages.values, values);
  if (queries.shape(3) != key_dim) refuse("queries and keys must have the same head_dim");
  if (key_dim % 8 != 0 || value_dim % 8 != 0) refuse("head_dim must be a multiple of 8");
  if (queries.shape(1) % pages.keys.shape(1) != 0) refuse("query heads must be a multiple of kv heads");
  const int batch = queries.shape(0);
  if (rows.row_starts) {
    if (block_table.ndim() != 1) refuse("with row_starts block_table must be (page_ids,)");
    if (rows.row_starts->ndim() != 1 || rows.row_starts->shape(0) != batch)
      refuse("row_starts " + text_of(rows.row_starts->shape()) + " must be (batch,)");
  } else if (block_table.ndim() != 2 || block_table.shape(0) != batch) {
    refuse("block_table must be (batch, max_pages)");
  }
}

void check_arguments(const Rows& rows, const std::optional<OpenRows>& open, const mx::array& queries,
                     const mx::array& context_lens, const mx::array& query_lens, const AttentionOptions& options) {
  auto refuse = [&](const std::string& what) {
    throw std::invalid_argument(std::string(kName) + ": " + what + " (queries " + text_of(queries.shape()) +
                                ", context_lens " + text_of(context_lens.shape()) + ", query_lens " +
                                text_of(query_lens.shape()) + ")");
  };
  if (queries.ndim() != 4) refuse("queries must be (batch, query_heads, tokens, head_dim)");
  check_rows(rows, queries, options.keys, options.values);
  if (open) {
    const Pages& pages = open->rows.pages;
    check_rows(open->rows, queries, {}, {});
    const mx::Shape &keys = rows.pages.keys.shape(), &open_keys = pages.keys.shape();
    if (keys[1] != open_keys[1] || keys[2] != open_keys[2] ||
        dim_of(rows.pages.values, options.values) != pages.values.shape(3))
      refuse("open pages " + text_of(open_keys) + " don't go with pages " + text_of(keys));
    if (open->full_until.ndim() != 1 || open->full_until.shape(0) != queries.shape(0))
      refuse("full_until " + text_of(open->full_until.shape()) + " must be (batch,)");
  }
  if (context_lens.ndim() != 1 || context_lens.shape(0) != queries.shape(0) ||
      query_lens.shape() != context_lens.shape())
    refuse("context_lens and query_lens must be (batch,)");
  if (options.window < 0 || options.keep < 0 || (options.window > 0 && options.keep >= options.window))
    refuse("window=" + std::to_string(options.window) + " must be positive and more than keep=" +
           std::to_string(options.keep));
}

}  // namespace

std::pair<mx::array, mx::array> attend(
    const Rows& rows, const std::optional<OpenRows>& open, const mx::array& queries, const mx::array& context_lens,
    const mx::array& query_lens, const std::optional<mx::array>& mask, const std::optional<mx::array>& sinks,
    const AttentionOptions& options) {
  check_arguments(rows, open, queries, context_lens, query_lens, options);
  const mx::Stream stream = cpu_stream();
  std::vector<mx::array> inputs = {
      queries, contiguous_as(context_lens, mx::int32, stream), contiguous_as(query_lens, mx::int32, stream)};
  bool known_rows = known(inputs[1]) && known(inputs[2]);
  auto add = [&](const Rows& each) {
    inputs.push_back(each.pages.keys);
    inputs.push_back(each.pages.values);
    inputs.push_back(contiguous_as(each.block_table, mx::int32, stream));
    known_rows = known_rows && known(inputs.back());
    if (each.row_starts) inputs.push_back(contiguous_as(*each.row_starts, mx::int32, stream));
    known_rows = known_rows && known(inputs.back());
  };
  add(rows);
  if (open) {
    add(open->rows);
    inputs.push_back(contiguous_as(open->full_until, mx::int32, stream));
    known_rows = known_rows && known(inputs.back());
  }
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

  const Given given{bool(rows.row_starts), bool(open), open && open->rows.row_starts, bool(mask), bool(sinks)};
  auto primitive = std::make_shared<PagedAttention>(stream, options, given, kind, known_rows);
  if (known_rows) check(primitive->describe(inputs));
  add_pending(inputs, rows.pages.written, rows.pages.last_read);
  if (open) add_pending(inputs, open->rows.pages.written, open->rows.pages.last_read);
  mx::Shape shape = queries.shape();
  shape[3] = dim_of(rows.pages.values, options.values);
  auto outputs = mx::array::make_arrays({shape, token_shape()}, {queries.dtype(), token_dtype()}, primitive, inputs);
  return {outputs[0], outputs[1]};
}

}  // namespace tinykv
