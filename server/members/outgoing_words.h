// Words that wait to be sent on a link: an end of the engine's (WordSink). One is written at a time.
#ifndef BALLAST_SERVER_MEMBERS_OUTGOING_WORDS_H_
#define BALLAST_SERVER_MEMBERS_OUTGOING_WORDS_H_

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "cpu_optimizer_service/common/system/helper_threads.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/job/members/words.h"
#include "cpu_optimizer_service/job/members/words_codec.h"

namespace ballast::server {

// Thread-safe.
template <typename Word>
class OutgoingWords final : public WordSink<Word>,
                            public std::enable_shared_from_this<OutgoingWords<Word>> {
 public:
  // `run` runs a task on a thread that may write. `write` begins a write; `end` ends the sending
  // side, once all is written. Neither is called after Close.
  OutgoingWords(std::function<void(std::function<void()>)> run,
                std::function<void(std::string bytes)> write, std::function<void()> end)
      : run_(std::move(run)), write_(std::move(write)), end_(std::move(end)) {}

  // With the job's lock: nothing is encoded or written here.
  void Send(Word word) override {
    MutexLock lock(mutex_);
    if (closed_ || ends_) return;
    words_.push_back(std::move(word));
    if (!std::exchange(busy_, true)) RunNext();
  }
  // The caller has begun a write of its own, before all words.
  void Begin() {
    MutexLock lock(mutex_);
    busy_ = true;
  }
  // What was begun last is written.
  void Written() {
    MutexLock lock(mutex_);
    if (!closed_) RunNext();
  }
  void Replaced() override { End(); }
  // Ends the sending side behind all words.
  void End() {
    MutexLock lock(mutex_);
    if (std::exchange(ends_, true) || closed_) return;
    if (!std::exchange(busy_, true)) RunNext();
  }
  // Waits for a write that is being begun. Not from one.
  void Close() {
    const MutexLock writing(writing_);
    MutexLock lock(mutex_);
    closed_ = true;
    words_.clear();
  }

 private:
  void RunNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    run_([self = this->shared_from_this()] { self->Next(); });
  }
  void Next() {
    const MutexLock writing(writing_);
    std::string bytes;
    {
      MutexLock lock(mutex_);
      if (closed_) return;
      if (words_.empty()) {
        busy_ = ends_;
        if (!ends_) return;
      } else {
        bytes = Encode(words_.front());
        words_.pop_front();
      }
    }
    bytes.empty() ? end_() : write_(std::move(bytes));
  }

  const std::function<void(std::function<void()>)> run_;
  const std::function<void(std::string)> write_;
  const std::function<void()> end_;
  Mutex writing_;  // Before mutex_.
  Mutex mutex_;
  std::deque<Word> words_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;  // A write is under way or about to begin.
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_MEMBERS_OUTGOING_WORDS_H_
