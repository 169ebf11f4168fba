// The tries of an attempt: each rank discards its own, and goes on to the next.
#ifndef BALLAST_TESTS_HISTORIES_TRIES_H_
#define BALLAST_TESTS_HISTORIES_TRIES_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "tests/histories/history.h"
#include "tests/histories/random.h"
#include "tests/histories/script.h"

namespace ballast::histories {

// Borrows its arguments. Thread-compatible.
class Tries {
 public:
  Tries(const JobPlan& job, const Attempt& attempt, const Layout& layout)
      : job_(job), attempt_(attempt), layout_(layout) {}

  const Attempt& attempt(uint32_t number) { return Find(number).attempt; }
  Script& script(uint32_t number) { return Find(number).script; }

  // All calls of a rank's try.
  std::vector<Call> CallsOf(int rank, uint32_t number) {
    std::vector<Call> calls = script(number).CallsOf(rank);
    for (Call& call : calls) call.try_number = number;
    return calls;
  }
  // The rank begins this try: in place of the calls that it had still to make, from `next` on, it
  // makes all of this try's, among the others'.
  void Redo(std::vector<Call>& calls, size_t next, int rank, uint32_t number) {
    std::deque<Call> others;
    for (size_t i = next; i < calls.size(); ++i) {
      if (calls[i].rank != rank) others.push_back(calls[i]);
    }
    calls.resize(next);
    Random random(attempt_.order_seed + 31 * number + rank);
    for (const Call& own : CallsOf(rank, number)) {
      while (!others.empty() && random.OneIn(2)) {
        calls.push_back(others.front());
        others.pop_front();
      }
      calls.push_back(own);
    }
    calls.insert(calls.end(), others.begin(), others.end());
  }

 private:
  struct Try {
    Try(const JobPlan& job, Attempt of, const Layout& layout)
        : attempt(std::move(of)), script(job, attempt, layout) {}
    const Attempt attempt;
    Script script;
  };
  Try& Find(uint32_t number) {
    while (tries_.size() <= number) {
      tries_.emplace_back(job_, TryOf(attempt_, static_cast<uint32_t>(tries_.size())), layout_);
    }
    return tries_[number];
  }

  const JobPlan& job_;
  const Attempt& attempt_;
  const Layout& layout_;
  std::deque<Try> tries_;
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_TRIES_H_
