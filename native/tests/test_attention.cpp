// Attention over pages, by every instruction set of this processor, against double precision.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention.h"
#include "check.h"
#include "dispatch.h"
#include "numbers.h"
#include "thread_pool.h"

using namespace tinykv;

namespace {

struct Case {
  std::vector<int> contexts;
  int queries = 1;
  int query_heads = 4;
  int kv_heads = 2;
  int key_dim = 64;
  int value_dim = 64;
  int page_size = 16;
  Dtype dtype = Dtype::float32;
  bool causal = true;
  int window = 0;
  int keep = 0;
  float softcap = 0;
  bool sinks = false;
  MaskKind mask = MaskKind::none;
  int key_bits = 0;
  int value_bits = 0;
  int group_size = 64;

  Format keys() const { return {dtype, key_bits, key_bits ? group_size : 0}; }
  Format values() const { return {dtype, value_bits, value_bits ? group_size : 0}; }
};

// A case's arrays, in heap memory of exactly their size; slots without a token are NaN.
struct Memory {
  Attention attention;
  std::vector<char> queries, keys, values, out;
  std::vector<int32_t> table, contexts, query_lens;
  std::vector<float> sinks, additive;
  std::vector<uint8_t> boolean;

  explicit Memory(const Case& c);
};

void place(std::vector<char>& pages, const std::vector<char>& rows, size_t from, size_t to, size_t bytes) {
  std::memcpy(&pages[to * bytes], &rows[from * bytes], bytes);
}

// A power of two, or minus one, as `dtype`.
void append(std::vector<char>& to, float x, Dtype dtype) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  uint32_t narrow = bits >> 16;
  if (dtype == Dtype::float16) narrow = (bits >> 31 << 15) | (((bits >> 23 & 0xff) - 112) << 10);
  const char* bytes = reinterpret_cast<const char*>(dtype == Dtype::float32 ? &bits : &narrow);
  to.insert(to.end(), bytes, bytes + size_of(dtype));
}

// Random rows in `format`.
std::vector<char> random_rows(size_t count, int dim, const Format& format, int seed) {
  if (format.bits == 0) return test::random_numbers(count * dim, format.dtype, seed);
  std::mt19937 random(seed);
  std::vector<char> rows;
  for (size_t i = 0; i < count; ++i) {
    for (size_t byte = 0; byte < format.packed_bytes(dim); ++byte) rows.push_back(char(random()));
    const int groups = dim / format.group_size;
    for (int g = 0; g < groups; ++g) append(rows, std::ldexp(1.f, int(random() % 2) - format.bits), format.dtype);
    for (int g = 0; g < groups; ++g) append(rows, random() % 2 ? -1.f : -0.5f, format.dtype);
  }
  return rows;
}

// Element `d` of the row in a slot.
double element(const char* rows, size_t slot, int dim, int d, const Format& format) {
  const char* row = rows + slot * format.row_bytes(dim);
  if (format.bits == 0) return test::to_double(row + d * size_of(format.dtype), format.dtype);
  int number = 0;
  for (int bit = 0; bit < format.bits; ++bit) {
    const int at = d * format.bits + bit;
    number |= (row[at / 8] >> (at % 8) & 1) << bit;
  }
  const int groups = dim / format.group_size, group = d / format.group_size;
  const char* affine = row + format.packed_bytes(dim);
  return number * test::to_double(affine + group * size_of(format.dtype), format.dtype) +
         test::to_double(affine + (groups + group) * size_of(format.dtype), format.dtype);
}

Memory::Memory(const Case& c) {
  const int batch = int(c.contexts.size());
  const int longest = *std::max_element(c.contexts.begin(), c.contexts.end());
  const int width = (longest + c.page_size - 1) / c.page_size + 1, pages = batch * width;
  std::vector<int> ids(pages);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(7));

  const size_t key_bytes = c.keys().row_bytes(c.key_dim), value_bytes = c.values().row_bytes(c.value_dim);
  keys.resize(size_t(pages) * c.kv_heads * c.page_size * key_bytes);
  values.resize(size_t(pages) * c.kv_heads * c.page_size * value_bytes);
  test::poison(keys);
  test::poison(values);
  const size_t tokens = size_t(batch) * longest * c.kv_heads;
  const auto new_keys = random_rows(tokens, c.key_dim, c.keys(), 1);
  const auto new_values = random_rows(tokens, c.value_dim, c.values(), 2);
  queries = test::random_numbers(size_t(batch) * c.query_heads * c.queries * c.key_dim, c.dtype, 3);
  out.resize(size_t(batch) * c.query_heads * c.queries * c.value_dim * size_of(c.dtype));

  table.assign(size_t(pages), -1);
  for (int row = 0; row < batch; ++row) {
    contexts.push_back(c.contexts[row]);
    query_lens.push_back(std::min(c.queries, c.contexts[row]));
    const int first = c.window && c.keep == 0 ? std::max(0, c.contexts[row] - c.window - c.queries + 1) : 0;
    for (int position = first; position < c.contexts[row]; ++position) {
      const int page = row * width + position / c.page_size;
      table[page] = ids[page];
      for (int head = 0; head < c.kv_heads; ++head) {
        const size_t from = (size_t(row) * longest + position) * c.kv_heads + head;
        const size_t to = (size_t(ids[page]) * c.kv_heads + head) * c.page_size + position % c.page_size;
        place(keys, new_keys, from, to, key_bytes);
        place(values, new_values, from, to, value_bytes);
      }
    }
  }
  for (int head = 0; head < c.query_heads; ++head) sinks.push_back(0.5f * head);
  for (int i = 0; i < c.queries * longest; ++i) {
    boolean.push_back(i % 3 != 0);
    additive.push_back(i % 5 == 0 ? -INFINITY : 0.1f * (i % 7));
  }

  Attention& a = attention;
  a.batch = batch;
  a.query_heads = c.query_heads;
  a.kv_heads = c.kv_heads;
  a.query_len = c.queries;
  a.key_dim = c.key_dim;
  a.value_dim = c.value_dim;
  a.num_pages = pages;
  a.page_size = c.page_size;
  a.table_width = width;
  a.queries = queries.data();
  a.dtype = c.dtype;
  a.key_format = c.keys();
  a.value_format = c.values();
  const int64_t token = c.key_dim, head = token * c.queries;
  std::copy_n(std::initializer_list<int64_t>{head * c.query_heads, head, token, 1}.begin(), 4, a.query_strides);
  a.keys = keys.data();
  a.values = values.data();
  a.out = out.data();
  a.block_table = table.data();
  a.context_lens = contexts.data();
  a.query_lens = query_lens.data();
  a.scale = 1 / std::sqrt(float(c.key_dim));
  a.causal = c.causal;
  a.window = c.window;
  a.keep = c.keep;
  a.softcap = c.softcap;
  a.sinks = c.sinks ? sinks.data() : nullptr;
  a.mask = c.mask;
  a.mask_data = c.mask == MaskKind::boolean ? reinterpret_cast<const char*>(boolean.data())
                                            : reinterpret_cast<const char*>(additive.data());
  a.mask_strides[2] = longest;
  a.mask_strides[3] = 1;
  a.mask_positions = longest;
}

// One query's output in double precision.
std::vector<double> expected(const Attention& a, int row, int head, int token) {
  const Visible seen = visible(a, row, token);
  const int64_t* strides = a.query_strides;
  const int64_t query = row * strides[0] + head * strides[1] + token * strides[2];
  std::vector<double> scores, out(a.value_dim, 0);
  std::vector<size_t> slots;
  for (int position = 0; position < a.context_lens[row]; ++position) {
    if (position >= seen.end || (position >= seen.kept && position < seen.begin)) continue;
    const size_t page = a.block_table[row * a.table_width + position / a.page_size];
    const size_t slot = (page * a.kv_heads + head / a.rows_per_token()) * a.page_size + position % a.page_size;
    double score = 0;
    for (int d = 0; d < a.key_dim; ++d)
      score += test::to_double(a.queries + (query + d) * size_of(a.dtype), a.dtype) *
               element(a.keys, slot, a.key_dim, d, a.key_format);
    score *= a.scale;
    if (a.softcap != 0) score = a.softcap * std::tanh(score / a.softcap);
    const int64_t at = token * a.mask_strides[2] + position;
    if (a.mask == MaskKind::boolean && !a.mask_data[at]) continue;
    if (a.mask == MaskKind::additive) score += reinterpret_cast<const float*>(a.mask_data)[at];
    scores.push_back(score);
    slots.push_back(slot);
  }
  double highest = a.sinks ? a.sinks[head] : -INFINITY, sum = 0;
  for (double score : scores) highest = std::max(highest, score);
  if (a.sinks) sum = std::exp(a.sinks[head] - highest);
  for (size_t i = 0; i < scores.size(); ++i) {
    if (scores[i] == -INFINITY) continue;
    const double weight = std::exp(scores[i] - highest);
    sum += weight;
    for (int d = 0; d < a.value_dim; ++d)
      out[d] += weight * element(a.values, slots[i], a.value_dim, d, a.value_format);
  }
  for (double& x : out) x = sum > 0 ? x / sum : 0;
  return out;
}

double largest_error(const Memory& memory) {
  const Attention& a = memory.attention;
  double worst = 0;
  for (int row = 0; row < a.batch; ++row)
    for (int head = 0; head < a.query_heads; ++head)
      for (int token = 0; token < a.query_len; ++token) {
        std::vector<double> right(a.value_dim, 0);
        if (token < a.query_lens[row]) right = expected(a, row, head, token);
        const size_t at = ((size_t(row) * a.query_heads + head) * a.query_len + token) * a.value_dim;
        for (int d = 0; d < a.value_dim; ++d) {
          const double error = std::abs(test::to_double(a.out + (at + d) * size_of(a.dtype), a.dtype) - right[d]);
          worst = error <= worst ? worst : error;
          if (std::isnan(error)) return error;
        }
      }
  return worst;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16}) {
    auto add = [&](Case c) {
      c.dtype = dtype;
      all.push_back(c);
    };
    add({.contexts = {1, 63, 64, 65, 0}});
    add({.contexts = {511, 512, 513}, .query_heads = 3, .kv_heads = 1, .key_dim = 80, .value_dim = 40});
    add({.contexts = {1030}, .query_heads = 1, .kv_heads = 1, .key_dim = 256, .value_dim = 256, .page_size = 1});
    add({.contexts = {90, 200}, .page_size = 48});
    add({.contexts = {5, 90}, .queries = 5, .query_heads = 8, .kv_heads = 2, .key_dim = 72, .value_dim = 24});
    add({.contexts = {70, 600}, .queries = 40, .query_heads = 6, .kv_heads = 2, .key_dim = 40, .value_dim = 104});
    add({.contexts = {30, 700}, .queries = 20, .causal = false});
    add({.contexts = {700, 20}, .window = 100});
    add({.contexts = {700, 20}, .queries = 33, .window = 100});
    add({.contexts = {1700, 20}, .window = 600, .keep = 4});
    add({.contexts = {130, 40}, .queries = 3, .softcap = 2, .sinks = true});
    add({.contexts = {130, 40}, .queries = 3, .mask = MaskKind::boolean});
    add({.contexts = {130, 40}, .queries = 30, .causal = false, .sinks = true, .mask = MaskKind::additive});
    for (int bits : {4, 5, 6, 8}) {
      add({.contexts = {1, 63, 64, 65, 0}, .key_bits = bits, .value_bits = 12 - bits == 7 ? 5 : 12 - bits});
      add({.contexts = {600}, .query_heads = 1, .kv_heads = 1, .key_bits = bits, .value_bits = bits});
      add({.contexts = {90, 70}, .queries = 30, .key_dim = 96, .value_dim = 32, .page_size = 1, .key_bits = bits,
           .value_bits = bits, .group_size = 32});
    }
    add({.contexts = {200}, .window = 30, .value_bits = 4});
  }
  return all;
}

void test_numbers() {
  for (const std::string& isa : isas()) {
    choose_isa(isa);
    int number = 0;
    for (const Case& c : cases()) {
      Memory memory(c);
      check(memory.attention);
      run(memory.attention);
      const double error = largest_error(memory);
      const double allowed = c.dtype == Dtype::float32 ? 3e-5 : c.dtype == Dtype::float16 ? 2e-3 : 1.6e-2;
      CHECK_WITH(error < allowed, isa + " case " + std::to_string(number) + " error " + std::to_string(error));
      ++number;
    }
  }
  choose_isa("");
}

// The same numbers, bit for bit, however many threads there are and however the work is split.
void test_threads() {
  for (Case c : {Case{.contexts = {3000}, .query_heads = 8, .kv_heads = 2}, Case{.contexts = {900}, .queries = 100}}) {
    Memory one(c), many(c);
    ThreadPool::set_threads(1);
    run(one.attention);
    ThreadPool::set_threads(4);
    run(many.attention);
    CHECK(one.out == many.out);
  }
  ThreadPool::set_threads(0);
}

void test_refusals() {
  auto refusal = [](auto change) {
    Memory memory(Case{.contexts = {40, 20}});
    change(memory);
    return test::message_of([&] { check(memory.attention); });
  };
  CHECK(refusal([](Memory&) {}).empty());
  CHECK(refusal([](Memory& m) { m.table[1] = -1; }).find("block_table[0][1] is -1") != std::string::npos);
  CHECK(refusal([](Memory& m) { m.table[4] = 99; }).find("block_table[1][0] is 99") != std::string::npos);
  CHECK(refusal([](Memory& m) { m.contexts[0] = 1000; }).find("context_lens[0] is 1000") != std::string::npos);
  CHECK(refusal([](Memory& m) { m.query_lens[1] = 2; }).find("query_lens[1] is 2") != std::string::npos);
  CHECK(refusal([](Memory& m) { m.attention.window = 3; m.attention.keep = 2; }).empty());
}

}  // namespace

int main() {
  test_numbers();
  test_threads();
  test_refusals();
  return test::failures;
}
