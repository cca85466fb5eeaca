#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "dispatch.h"
#include "mlx/version.h"
#include "pool_array.h"
#include "pool_memory.h"
#include "primitives.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tinykv;

using OptionalArray = std::optional<mx::array>;
// Bits, group size, elements of a head, dtype of scales and biases.
using PackingNumbers = std::tuple<int, int, int, mx::Dtype>;

static Packing packing(const std::optional<PackingNumbers>& numbers) {
  if (!numbers) return {};
  const auto& [bits, group_size, dim, dtype] = *numbers;
  return {bits, group_size, dim, dtype};
}

// Key pages, value pages, block table, row starts, full_until, and what must have happened before: written, last_read.
using OpenArrays =
    std::tuple<mx::array, mx::array, mx::array, OptionalArray, mx::array, OptionalArray, OptionalArray>;

static std::optional<OpenRows> open_rows(const std::optional<OpenArrays>& open) {
  if (!open) return {};
  const auto& [keys, values, block_table, row_starts, full_until, written, last_read] = *open;
  return OpenRows{{{keys, values, written, last_read}, block_table, row_starts}, full_until};
}

NB_MODULE(_ext, m) {
  m.attr("built_for") = std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) + "." +
                        std::to_string(MLX_VERSION_PATCH);
  m.def("running_with", [] { return std::string(mx::version()); });
  m.def("size", [](const mx::array& array) { return array.size(); }, "array"_a);

  m.def(
      "attend",
      [](const mx::array& queries, const mx::array& key_pages, const mx::array& value_pages,
         const mx::array& block_table, const mx::array& context_lens, const mx::array& query_lens, float scale,
         bool causal, int window, int keep, float softcap, const std::optional<PackingNumbers>& keys,
         const std::optional<PackingNumbers>& values, const OptionalArray& row_starts,
         const OptionalArray& mask, const OptionalArray& sinks, const OptionalArray& written,
         const OptionalArray& last_read, const std::optional<OpenArrays>& open) {
        return attend({{key_pages, value_pages, written, last_read}, block_table, row_starts}, open_rows(open), queries,
                      context_lens, query_lens, mask, sinks,
                      {scale, causal, window, keep, softcap, packing(keys), packing(values)});
      },
      "queries"_a, "key_pages"_a, "value_pages"_a, "block_table"_a, "context_lens"_a, "query_lens"_a, nb::kw_only(),
      "scale"_a, "causal"_a = false, "window"_a = 0, "keep"_a = 0, "softcap"_a = 0.0f, "keys"_a.none() = nb::none(),
      "values"_a.none() = nb::none(), "row_starts"_a.none() = nb::none(), "mask"_a.none() = nb::none(),
      "sinks"_a.none() = nb::none(), "written"_a.none() = nb::none(), "last_read"_a.none() = nb::none(),
      "open"_a.none() = nb::none());
  m.def(
      "write_pages",
      [](const mx::array& key_pages, const mx::array& value_pages, const mx::array& slot_mapping, const mx::array& keys,
         const mx::array& values, const OptionalArray& written, const OptionalArray& last_read) {
        return write_pages({key_pages, value_pages, written, last_read}, slot_mapping, keys, values);
      },
      "key_pages"_a, "value_pages"_a, "slot_mapping"_a, "keys"_a, "values"_a, nb::kw_only(),
      "written"_a.none() = nb::none(), "last_read"_a.none() = nb::none());
  m.def(
      "copy_pages",
      [](const mx::array& key_pages, const mx::array& value_pages, std::vector<int> sources, std::vector<int> targets,
         const OptionalArray& written, const OptionalArray& last_read) {
        return copy_pages({key_pages, value_pages, written, last_read}, std::move(sources), std::move(targets));
      },
      "key_pages"_a, "value_pages"_a, "sources"_a, "targets"_a, nb::kw_only(), "written"_a.none() = nb::none(),
      "last_read"_a.none() = nb::none());

  m.def(
      "resize_pages",
      [](const OptionalArray& pool, const std::vector<int>& shape, mx::Dtype dtype, int64_t reserve) {
        return resize_pages(pool, mx::Shape(shape.begin(), shape.end()), dtype, reserve);
      },
      "pool"_a.none(), "shape"_a, "dtype"_a, "reserve"_a = 0);
  m.def("fits", &fits, "pool"_a, "num_pages"_a);
  m.def("pool_bytes", [] {
    const PoolBytes bytes = pool_bytes();
    return std::make_tuple(bytes.reserved, bytes.usable, bytes.committed);
  });
  m.def(
      "data_pointer",
      [](const mx::array& array) { return reinterpret_cast<uintptr_t>(array.data<char>()); },
      "array"_a);

  m.def("set_threads", &ThreadPool::set_threads, "threads"_a);
  m.def("threads", &ThreadPool::threads);
  m.def("isas", &isas);
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("choose_isa", &choose_isa, "name"_a);
}
