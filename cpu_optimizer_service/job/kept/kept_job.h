// What of a job outlives the service's process, and in which order it is stored.
//
// All of it is named memory (host/named_memory.h) under the job's uid:
//
//   identity     who the job is: uid and description. Stored once.
//   record       all that is small, as one record that is flipped whole: JobRecord, the ranks, and
//                whether all first weights have come.
//   table        by chunk: slot, step, and whether its first weights have come; of its previous
//                version, too, if that is kept (chunk_store.h)
//   state, second versions, previous versions, versions N   the slots
//   gradients, accumulators, gradient of chunk N  gradients in every form (gradient_store.h)
//   ledger       by chunk: what has been added to it, and where that lies
//   log          of the step in progress: what ranks have said beside gradients
//   redo         one lane for each update under way (kernels/redo_lane.h)
//   sums         one lane for each gradient that is being added to a sum
//   write N      what is written of state between steps, until all of it is there
//   rank R N     memory shared with a rank
//
// All of it but slots, gradients and the values in lanes is covered: record, identity and each entry
// of the log by a checksum, every word of the others by its own check bits (checked_word.h; a lane's
// by those in redo_lane.h).
//
// The order of stores, which alone makes an instant safe:
//
//   created      memory for the record, everything else, then the record's first flip. Without that
//                there is no job; with it a file that is missing was taken away, and the job is
//                refused until it is back.
//   first weights  where moments come along, the flip with the step and the update counts that the
//                job begins at; of a chunk its planes, then its word in the table; when all have come
//                each word with that step, then the flip that says so.
//   contribution the gradient's last byte, then the ledger's word, then it is acknowledged. A sum
//                that it changes: a lane with its tag, each turn its record, then the sum; after the
//                ledger's word the lane is free. A lane that an earlier process left is freed after
//                the flip that ends its step. Where no lane is free: a ledger's word by which
//                the chunk's gradient is lost, then the sum, then the ledger's word.
//   said         the entry, then the log's end, then it is acknowledged.
//   decision     the flip that has it, then any rank is notified, then the first chunk is updated.
//   update       each turn its redo record, then the planes; the chunk's last plane, then its word
//                in the table, then the lane is free. Of a rule with two rounds: the word that the
//                chunk is half new, and its directions.
//   commit       the last chunk's word, then the flip that has the step committed and an epoch more.
//                Words of the ledger and entries of the log count only in their epoch, so nothing is
//                cleared.
//   second round the commit's flip says that it is outstanding, and from there on the directions
//                count; O, then the flip with the second decision; then updates as above; then the
//                flip that the round is over.
//   undo         the flip with the step before, a generation and an epoch more, and which step and
//                generation it went back from; then the chunks' words
//                in the table. A chunk whose word is of a later step has not gone back yet.
//   write        the last of its values, then the flip that names them, with its update counts; of
//                a chunk its planes, then its word in the table; then the flip that it is done.
//   abort, load  the flip with a generation and an epoch more; of a load, which directory is being
//                loaded, and when it is, a flip that it is.
//   derive       of the new job all that it has from the old one, then who it is; when its first
//                weights are there the flip that says so, from which it is the job; then the old
//                one is closed. A new one without that flip is forgotten.
//   closed       the flip that says so, then the memory goes.
//
// The next process (job_recover.cc) takes over identity, record and table. A decided step it rolls
// forward: chunks whose word in the table has the step are done, those with a lane go on behind
// their last turn, all others are updated from their gradients. A second round that is not decided
// begins again, from the directions. Of an undecided step it takes the log's entries in their order and
// the ledger's words of the epoch; ranks that come back send what was not acknowledged, and what had
// been half added goes on behind its last turn. If a gradient of it lay in memory that is gone, or what says so is not as it was stored, the step goes by on_abort: it
// is skipped where all ranks had begun it and cannot do it again, and otherwise dropped by a new
// generation, in which they do. Whatever else is not as it was stored has the job refused, before
// anything is changed.
//
// Thread-compatible: the job's lock guards it, except lanes, and words of chunks that one
// thread at a time works on.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_KEPT_KEPT_JOB_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_KEPT_KEPT_JOB_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/gradients/gradient_store.h"
#include "cpu_optimizer_service/host/kept_record.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/job/core/job_record.h"
#include "cpu_optimizer_service/job/kept/lane_pool.h"
#include "cpu_optimizer_service/job/step/step_machine.h"

namespace ballast {

// The format of all that is kept. A process that takes over reads it, or there is nothing to take.
inline constexpr uint32_t kKeptFormat = 4;

class KeptJob {
 public:
  struct Rank {
    std::string last_process_id;
    std::string memory;  // The name of what it shares; empty: nothing.
  };
  struct Contribution {
    uint64_t epoch = 0;
    uint32_t attempt = 0;
    uint32_t next_micro_step = 0;
    bool closed = false;
    GradientStore::Kept kept = GradientStore::Kept::kNone;
  };

  // For a new job; nothing is stored before Create.
  KeptJob(NamedMemory& memory, JobIdentity identity);
  // What an earlier process left under `uid`. NOT_FOUND: it had not got so far as to create the
  // job, had closed it, or given it up. DATA_LOSS, FAILED_PRECONDITION (of another version): in one
  // line.
  static absl::StatusOr<std::unique_ptr<KeptJob>> TakeOver(NamedMemory& memory,
                                                           const std::string& uid);

  const JobIdentity& identity() const { return identity_; }
  NamedArenas& arenas() { return arenas_; }
  bool taken_over() const { return taken_over_; }
  // What was taken over. Once each.
  JobRecord TakeRecord() { return std::move(record_); }
  std::vector<Rank> TakeRanks() { return std::move(ranks_); }
  bool weights_complete() const { return weights_complete_; }  // As it was taken over.

  // Memory for `chunks` words and `lanes` lanes, or what an earlier process left of it.
  absl::Status Allocate(int64_t chunks, int lanes);
  // All of the job is there: stores who it is.
  absl::Status StoreIdentity();
  // RESOURCE_EXHAUSTED: no memory for it.
  absl::Status Store(const JobRecord& record, bool weights_complete,
                     const std::vector<Rank>& ranks);
  // From now on a later process finds no such job. Needs no memory.
  void GiveUp();

  absl::Status Say(uint64_t epoch, const StepWord& word);
  absl::Status ReadLog(uint64_t epoch, const std::function<void(StepWord)>& visit);

  void StoreContribution(int64_t chunk, const Contribution& contribution);
  // What it says of earlier epochs goes, and with it words that are not as they were stored.
  void ClearLedger();
  // Whether anything was added to any chunk in that epoch. DATA_LOSS, as of the next: a word is not
  // as it was stored; the message names the memory.
  absl::StatusOr<bool> HasContributions(uint64_t epoch) const;
  // What was added in that epoch and attempt; otherwise nothing was.
  absl::StatusOr<Contribution> ReadContribution(int64_t chunk, uint64_t epoch,
                                                uint32_t attempt) const;

  // What distinguishes a contribution from all others to its chunk: a checked word.
  static constexpr int kMicroStepBits = 17;  // kMaxMicroSteps and one more.
  static uint64_t TagOf(uint64_t epoch, uint32_t attempt, uint32_t micro_step_end);
  // For adding to a chunk's sum, with that tag. They are given back after the ledger's word.
  LanePool& sum_lanes() { return sum_lanes_; }
  // For the update of a chunk in place; the tag is a checked word of the step. They are given back
  // after the chunk's word in the table.
  LanePool& update_lanes() { return update_lanes_; }
  // Nothing that an earlier process had begun is gone on with.
  void FreeLeftLanes() {
    sum_lanes_.FreeLeft();
    update_lanes_.FreeLeft();
  }

 private:
  // The value of a chunk's word. DATA_LOSS.
  absl::StatusOr<uint64_t> ReadLedger(int64_t chunk) const;

  const JobIdentity identity_;
  NamedArenas arenas_;
  KeptRecord record_record_;  // The first to be made, and the last to go.
  KeptRecord identity_record_;
  KeptLog log_;
  int64_t chunks_ = 0;
  std::unique_ptr<Arena> ledger_;
  std::unique_ptr<Arena> redo_;
  std::unique_ptr<Arena> sums_;
  JobRecord record_;
  bool weights_complete_ = false;
  std::vector<Rank> ranks_;
  bool taken_over_ = false;
  bool given_up_ = false;
  LanePool sum_lanes_{"a sum's lane is taken", "a sum's lane is free"};
  LanePool update_lanes_{"a lane is taken", "a lane is free"};
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_KEPT_KEPT_JOB_H_
