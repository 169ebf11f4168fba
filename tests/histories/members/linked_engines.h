// The members of one job: an engine each, links between them, and deaths of one of them.
//
// One thread, the links', delivers all words, cuts and opens links, and takes over from a process
// that has died. Words wait on wires. The seed says which wire is next; each keeps its own order.
#ifndef BALLAST_TESTS_HISTORIES_MEMBERS_LINKED_ENGINES_H_
#define BALLAST_TESTS_HISTORIES_MEMBERS_LINKED_ENGINES_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/host/file_system.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/job/members/words.h"
#include "tests/histories/engine/deaths.h"
#include "tests/histories/members/host.h"
#include "tests/histories/random.h"

namespace ballast::histories {

// Where a link is cut: its `word`th word, and what is on its wires behind it, is lost.
struct LinkCut {
  enum How : uint8_t {
    kSeen,    // Both ends know of it before the next link is opened.
    kUnseen,  // The next link takes the place of one that neither end knows to be cut.
    kLate,    // The same, and what is on the wires arrives after that.
  };
  int member = 0;  // Not the lead.
  int word = 0;
  How how = kSeen;
};

// Thread-safe, but for the members' accessors.
class LinkedEngines {
 public:
  // `victim`: the member that may die; -1: none.
  LinkedEngines(JobSpec spec, uint64_t seed, int threads, FileSystem& files, int victim);
  ~LinkedEngines();

  static constexpr char kSaved[] = "/saved";  // All members' --checkpoint-dir.

  absl::Status Create();
  int members() const { return spec_.member_count(); }
  Host& host(int member) { return *sides_[member].host; }
  Deaths* deaths() { return deaths_.get(); }  // Null without a victim.

  // From now on words are counted anew.
  void Plan(std::vector<LinkCut> cuts);
  // Waits until all is said between members, and no process is dead. No member may die meanwhile.
  // UNAVAILABLE: it has not come to that within a minute.
  absl::Status Settle();
  // Settled: the member's part.
  absl::StatusOr<std::shared_ptr<Job>> Part(int member);

  int64_t words() const;
  int64_t cuts() const;
  int64_t deaths_seen() const;

 private:
  template <typename Word>
  class Sink;
  class Dialer;
  struct Link;
  using Action = std::function<void()>;
  struct Side {
    std::unique_ptr<Host> host;
    std::unique_ptr<FileSystem> files;
    std::unique_ptr<CheckpointDirectory> checkpoints;
    std::unique_ptr<Engine> engine;
    // Wires of the member's link, and the link. Null: it is the lead, or has none now.
    std::deque<Action> to_member;
    std::deque<Action> to_lead;
    int words = 0;  // Since Plan.
    std::shared_ptr<Link> link;
  };

  void Run();
  // Null: all is over.
  Action Next();
  bool is_dead() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return dead_ != nullptr && *dead_; }
  bool IsSettled() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  DeathFlag FlagOf(int member) const {
    return member == victim_ ? deaths_->flag() : DeathFlag(nullptr);
  }
  void Put(std::deque<Action>& wire, Action deliver);
  void Start(int member, bool dials);
  void TakeOver();
  void Open(int member, const std::shared_ptr<Job>& job);
  void Close(int member);
  void Clear(Side& side);
  void Cut(const LinkCut& cut);

  const JobSpec spec_;
  const int threads_;
  FileSystem& files_;
  const int victim_;
  std::unique_ptr<Deaths> deaths_;
  std::unique_ptr<NamedMemory> memory_;  // The victim's.
  std::unique_ptr<Dialer> dialer_;

  mutable Mutex mutex_;
  CondVar changed_;
  Random random_ ABSL_GUARDED_BY(mutex_);
  // What the links' thread does before it delivers another word.
  std::deque<Action> actions_ ABSL_GUARDED_BY(mutex_);
  std::vector<LinkCut> planned_ ABSL_GUARDED_BY(mutex_);
  DeathFlag dead_ ABSL_GUARDED_BY(mutex_);  // Null without a victim.
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status fault_ ABSL_GUARDED_BY(mutex_);
  int64_t words_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t cuts_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t deaths_seen_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Side> sides_;  // Wires and counts: with the lock. All else: of the links' thread.
  std::thread thread_;
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_MEMBERS_LINKED_ENGINES_H_
