// Attention over pages, by every instruction set of this processor, against double precision.
#include "attention_expected.h"
#include "check.h"
#include "dispatch.h"
#include "thread_pool.h"

using namespace tinykv;
using test::Case;
using test::Memory;

namespace {

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
    // A query's own page is read from open pages.
    add({.contexts = {1, 15, 16, 17, 530, 0}, .key_bits = 4, .value_bits = 4, .open = true});
    add({.contexts = {1025}, .page_size = 24, .key_bits = 8, .value_bits = 5, .open = true});
    add({.contexts = {700, 50, 3}, .queries = 45, .key_bits = 4, .value_bits = 4, .open = true});
    add({.contexts = {600, 20}, .queries = 5, .window = 9, .softcap = 3, .sinks = true, .value_bits = 6, .open = true});
    add({.contexts = {700, 9}, .window = 40, .keep = 4, .key_bits = 4, .open = true});
    add({.contexts = {60, 30}, .queries = 1, .causal = false, .mask = MaskKind::additive, .key_bits = 4, .open = true});
    add({.contexts = {700, 550, 90}, .queries = 40, .key_bits = 8, .value_bits = 8, .open = true, .full_until = 530});
    add({.contexts = {30, 70}, .window = 20, .keep = 3, .key_bits = 8, .open = true, .full_until = 40});
    add({.contexts = {60, 30}, .queries = 4, .mask = MaskKind::boolean, .key_bits = 4, .open = true});
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
      const double error = test::largest_error(memory);
      const double allowed = c.dtype == Dtype::float32 ? 3e-5 : c.dtype == Dtype::float16 ? 2e-3 : 1.6e-2;
      CHECK_WITH(error < allowed, isa + " case " + std::to_string(number) + " error " + std::to_string(error));
      ++number;
    }
  }
  choose_isa("");
}

// The same numbers, bit for bit, however many threads there are and however the work is split.
void test_threads() {
  for (Case c : {Case{.contexts = {3000}, .query_heads = 8, .kv_heads = 2}, Case{.contexts = {900}, .queries = 100},
                 Case{.contexts = {40, 2000, 0, 600}}}) {
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

  auto open_refusal = [](int queries, auto change) {
    Memory memory(Case{.contexts = {40, 20}, .queries = queries, .key_bits = 4, .open = true});
    change(memory);
    return test::message_of([&] { check(memory.attention); });
  };
  CHECK(open_refusal(3, [](Memory&) {}).empty());
  CHECK(open_refusal(1, [](Memory& m) { m.open_table[2] = -1; }).find("open block_table[0][2] is -1") !=
        std::string::npos);
  CHECK(open_refusal(1, [](Memory& m) { m.attention.open.table_width = 2; }).find("open block table of 2 pages") !=
        std::string::npos);
  CHECK(open_refusal(3, [](Memory& m) { m.attention.causal = false; }).find("query_lens[0] is 3") != std::string::npos);
  CHECK(open_refusal(1, [](Memory& m) { m.attention.keep = 17; }).find("keep=17 is more") != std::string::npos);
}

}  // namespace

int main() {
  test_numbers();
  test_threads();
  test_refusals();
  return test::failures;
}
