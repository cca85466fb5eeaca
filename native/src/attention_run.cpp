#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>

#include "attention.h"
#include "attention_part.h"
#include "attention_plan.h"
#include "dispatch.h"
#include "thread_pool.h"

namespace tinykv {
namespace {

// Less work than this is done before another thread has woken up.
constexpr double kAloneOperations = 5e5;
// With fewer units per thread than this, parts of a unit are computed side by side and put together afterwards.
constexpr int kUnitsPerThread = 8;
constexpr size_t kMostStoredFloats = 64u << 20;

PartWorker& worker() {
  static thread_local PartWorker worker;
  return worker;
}

// The first exception of any thread.
class Failure {
 public:
  template <class Body>
  void guard(const Body& body) noexcept {
    try {
      body();
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }
  void rethrow() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

void store(const Attention& attention, const Unit& unit, const Partial& partial) {
  const int heads = attention.rows_per_token();
  const int64_t token_stride = attention.value_dim, head_stride = token_stride * attention.query_len;
  const int64_t head = int64_t(unit.row) * attention.query_heads + unit.kv_head * heads;
  const int64_t start = head * head_stride + unit.first_token * token_stride;
  const RowsView view{attention.out + start * int64_t(size_of(attention.dtype)), attention.dtype, heads, head_stride,
                      token_stride, 1};
  const float* sinks = attention.sinks == nullptr ? nullptr : attention.sinks + unit.kv_head * heads;
  kernels().store_rows(partial, heads * unit.tokens, attention.value_dim, sinks, view);
}

void zero_padding(const Attention& attention) {
  const size_t token_bytes = attention.value_dim * size_of(attention.dtype);
  for (int row = 0; row < attention.batch; ++row) {
    const int padding = attention.query_len - attention.query_lens[row];
    for (int head = 0; padding > 0 && head < attention.query_heads; ++head) {
      const int64_t end = (int64_t(row) * attention.query_heads + head + 1) * attention.query_len;
      std::memset(attention.out + (end - padding) * token_bytes, 0, padding * token_bytes);
    }
  }
}

// A unit's parts one after the other.
void run_unit(const Attention& attention, const Unit& unit, const NextPart& following) {
  PartWorker& mine = worker();
  mine.open(attention, unit);
  auto after = [&](int n) { return n + 1 < unit.parts() ? NextPart{&unit, n + 1} : following; };
  const Partial total = mine.own(0);
  mine.attend(attention, unit, 0, total, after(0));
  for (int n = 1; n < unit.parts(); ++n) {
    const Partial more = mine.own(1);
    mine.attend(attention, unit, n, more, after(n));
    kernels().merge(attention.rows_per_token() * unit.tokens, attention.value_dim, total, more);
  }
  store(attention, unit, total);
}

void run_units(const Attention& attention, const Plan& plan, bool alone) {
  Failure failure;
  const int units = int(plan.units.size()), threads = alone ? 1 : ThreadPool::threads();
  auto body = [&](int item) {
    const NextPart following{item + threads < units ? &plan.units[item + threads] : nullptr, 0};
    failure.guard([&] { run_unit(attention, plan.units[item], following); });
  };
  if (alone) {
    for (int item = 0; item < units; ++item) body(item);
  } else {
    ThreadPool::instance().run(units, body);
  }
  failure.rethrow();
}

// Runs of parts side by side; whoever computes a unit's last one merges all of them in order, as run_unit() does.
void run_parts(const Attention& attention, const Plan& plan) {
  struct Item {
    int unit, first, last;
  };
  // A few items per thread let the threads end together; long runs let each part fetch the next one's first tokens.
  const int threads = ThreadPool::threads();
  const int run = std::max(1, plan.parts / (threads * kUnitsPerThread));
  std::vector<Item> items;
  std::vector<int> first_part;  // of each unit, among all parts
  int parts = 0;
  for (int unit = 0; unit < int(plan.units.size()); ++unit) {
    const int end = plan.units[unit].parts();
    first_part.push_back(parts);
    for (int first = 0; first < end; first += run) items.push_back({unit, first, std::min(first + run, end)});
    parts += end;
  }
  const size_t stored = partial_floats(plan.most_rows, attention.value_dim);
  const std::unique_ptr<float[]> storage(new float[parts * stored]);
  std::vector<std::atomic<int>> done(plan.units.size());

  Failure failure;
  ThreadPool::instance().run(int(items.size()), [&](int index) {
    failure.guard([&] {
      const Item& item = items[index];
      const Unit& unit = plan.units[item.unit];
      const int rows = attention.rows_per_token() * unit.tokens;
      auto partial = [&](int n) {
        return partial_in(storage.get() + (first_part[item.unit] + n) * stored, rows, attention.value_dim);
      };
      worker().open(attention, unit);
      NextPart following{nullptr, 0};
      if (index + threads < int(items.size())) {
        const Item& later = items[index + threads];
        following = {&plan.units[later.unit], later.first};
      }
      for (int n = item.first; n < item.last; ++n) {
        worker().attend(attention, unit, n, partial(n), n + 1 < item.last ? NextPart{&unit, n + 1} : following);
      }
      const int count = item.last - item.first;
      if (done[item.unit].fetch_add(count, std::memory_order_acq_rel) + count < unit.parts()) return;
      for (int n = 1; n < unit.parts(); ++n) kernels().merge(rows, attention.value_dim, partial(0), partial(n));
      store(attention, unit, partial(0));
    });
  });
  failure.rethrow();
}

}  // namespace

void run(const Attention& attention) {
  zero_padding(attention);
  const Plan plan = tinykv::plan(attention);
  const bool alone = plan.operations < kAloneOperations || ThreadPool::threads() == 1;
  const bool few = int(plan.units.size()) < kUnitsPerThread * ThreadPool::threads() || plan.most_rows < kPad;
  const bool split = !alone && few && plan.parts > int(plan.units.size()) &&
                     plan.parts * partial_floats(plan.most_rows, attention.value_dim) <= kMostStoredFloats;
  if (split) run_parts(attention, plan);
  else run_units(attention, plan, alone);
}

}  // namespace tinykv
