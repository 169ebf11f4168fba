#include "cpu_optimizer_service/job/kept/kept_job.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/checked_word.h"
#include "cpu_optimizer_service/host/kept_codec.h"
#include "cpu_optimizer_service/job/core/fields.h"

namespace ballast {

template <typename Each>
void Fields(Each&& each, KeptJob::Rank& v) {
  each(v.last_process_id, v.memory);
}

namespace {

// The fields of a record, in the order that its format has.
template <typename Each, typename Record, typename Complete, typename Ranks>
void RecordFields(Each& each, Record& record, Complete& weights_complete, Ranks& ranks) {
  each(record.generation, record.committed_step, record.hyper_parameters, record.update_counts,
       record.trainer_state, record.history, record.resumed_uid, record.previous, record.epoch,
       record.closed, weights_complete, record.loads, record.loading, record.torn_by,
       record.later_changes, ranks, record.decision, record.undid_update, record.undone,
       record.writing, record.state_writes, record.ancestors, record.last_decision, record.prepared,
       record.reports, record.lost_part, record.closing, record.superseded_by, record.directions);
}

constexpr char kRecordLabel[] = "record";
constexpr char kIdentityLabel[] = "identity";
// Grown where a job needs more.
constexpr int64_t kRecordBytes = int64_t{64} << 10;
constexpr int64_t kLogBytes = int64_t{64} << 10;
// Threads that bring gradients: gRPC has 16 at most, and the engine's bring what had to wait. More
// add without a lane, and so do others while lanes are left of a process that died.
constexpr int kLeastSumLanes = 32;

// The value of a word of the ledger, which is a checked one.
constexpr int kKeptBits = 3;
constexpr int kClosedBits = 1;
constexpr int kNextBits = KeptJob::kMicroStepBits;
constexpr int kAttemptBits = 12;
static_assert(kMaxAttempts <= uint32_t{1} << kAttemptBits);
// The lowest bits of the epoch. Each whole step stores all words anew, so none is so old that its
// epoch could be taken for another one.
constexpr int kEpochBits = 23;
static_assert(kEpochBits + kAttemptBits + kNextBits + kClosedBits + kKeptBits == kCheckedValueBits);

struct WordPacker {
  uint64_t word = 0;
  // What is put in first ends up in the highest bits.
  void Put(uint64_t value, int bits) {
    word = word << bits | (value & ((uint64_t{1} << bits) - 1));
  }
};
struct WordUnpacker {
  uint64_t word = 0;
  uint64_t Take(int bits) {
    const uint64_t value = word & ((uint64_t{1} << bits) - 1);
    word >>= bits;
    return value;
  }
};

absl::Status OtherFormat(absl::string_view what, uint32_t format) {
  return absl::FailedPreconditionError(
      absl::StrCat(what, " has format ", format, ", but this service reads ", kKeptFormat,
                   "; start the version that wrote it, save, and load the checkpoint here"));
}

// Reads what comes after the format.
absl::Status Parse(absl::string_view what, const std::string& bytes,
                   absl::FunctionRef<void(KeptReader&)> read) {
  uint32_t format = 0;
  KeptReader reader(bytes);
  reader(format);
  if (reader.ok() && format != kKeptFormat) return OtherFormat(what, format);
  read(reader);
  if (reader.at_end()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(what, " cannot be read"));
}

}  // namespace

KeptJob::KeptJob(NamedMemory& memory, JobIdentity identity)
    : identity_(std::move(identity)),
      arenas_(memory, identity_.uid, absl::StrCat("job ", identity_.spec.name)),
      record_record_(arenas_, kRecordLabel, kRecordBytes),
      identity_record_(arenas_, kIdentityLabel, kRecordBytes),
      log_(arenas_, "log", kLogBytes) {}

absl::StatusOr<std::unique_ptr<KeptJob>> KeptJob::TakeOver(NamedMemory& memory,
                                                           const std::string& uid) {
  const std::string what = absl::StrCat("the kept state of the job with uid ", uid);
  NamedArenas arenas(memory, uid, "");
  KeptRecord record_record(arenas, kRecordLabel, kRecordBytes);
  KeptRecord identity_record(arenas, kIdentityLabel, kRecordBytes);
  const absl::StatusOr<std::string> record = record_record.TakeOver();
  const absl::StatusOr<std::string> who = identity_record.TakeOver();
  if (absl::IsNotFound(record.status()) && !record_record.was_made() &&
      identity_record.was_made()) {
    return arenas.Missing(kRecordLabel);  // It is made first.
  }
  BALLAST_RETURN_IF_ERROR(record.status());
  JobRecord of_job;
  bool weights_complete = false;
  std::vector<Rank> ranks;
  const auto read = [&](KeptReader& reader) {
    RecordFields(reader, of_job, weights_complete, ranks);
  };
  BALLAST_RETURN_IF_ERROR(Parse(what, *record, read));
  // Asked before the identity, which may be gone by then: a job that was closed loses its memory
  // part by part.
  if (of_job.closed) return absl::NotFoundError(absl::StrCat(what, " was closed"));
  if (absl::IsNotFound(who.status())) return arenas.Missing(kIdentityLabel);
  BALLAST_RETURN_IF_ERROR(who.status());
  JobIdentity identity;
  BALLAST_RETURN_IF_ERROR(Parse(what, *who, [&](KeptReader& reader) { reader(identity); }));
  auto kept = std::make_unique<KeptJob>(memory, std::move(identity));
  kept->taken_over_ = true;
  kept->record_record_.TakeFrom(std::move(record_record));
  kept->identity_record_.TakeFrom(std::move(identity_record));
  kept->record_ = std::move(of_job);
  kept->weights_complete_ = weights_complete;
  kept->ranks_ = std::move(ranks);
  return kept;
}

absl::Status KeptJob::Allocate(int64_t chunks, int lanes) {
  chunks_ = chunks;
  // Before all other memory of the job: where a later process finds the identity and not this,
  // somebody has taken it away.
  if (!taken_over_) BALLAST_RETURN_IF_ERROR(record_record_.Make());
  BALLAST_ASSIGN_OR_RETURN(ledger_, arenas_.Create(chunks * static_cast<int64_t>(sizeof(uint64_t)),
                                                   "ledger", ArenaFactory::Touch::kNow));
  // An earlier process may have had another number of threads, and so of lanes.
  constexpr auto kLaneBytes = static_cast<int64_t>(sizeof(RedoLane));
  const auto bytes = [&](int lanes) { return (taken_over_ ? 1 : lanes) * kLaneBytes; };
  BALLAST_ASSIGN_OR_RETURN(redo_, arenas_.Create(bytes(lanes), "redo", ArenaFactory::Touch::kNow));
  BALLAST_ASSIGN_OR_RETURN(sums_, arenas_.Create(bytes(std::max(lanes, kLeastSumLanes)), "sums",
                                                 ArenaFactory::Touch::kNow));
  for (auto [arena, pool] : {std::pair(&redo_, &update_lanes_), std::pair(&sums_, &sum_lanes_)}) {
    pool->Use({reinterpret_cast<RedoLane*>((*arena)->data()),
               static_cast<size_t>((*arena)->size_bytes() / kLaneBytes)});
  }
  if (!taken_over_) ClearLedger();
  return absl::OkStatus();
}

absl::Status KeptJob::StoreIdentity() {
  KeptWriter writer;
  writer(kKeptFormat, identity_);
  return identity_record_.Store(writer.bytes());
}

absl::Status KeptJob::Store(const JobRecord& record, bool weights_complete,
                            const std::vector<Rank>& ranks) {
  // A later process is to find no such job, so nothing is stored, and that is no error.
  if (given_up_) return absl::OkStatus();
  KeptWriter writer;
  writer(kKeptFormat);
  RecordFields(writer, record, weights_complete, ranks);
  return record_record_.Store(writer.bytes());
}

void KeptJob::GiveUp() {
  given_up_ = true;
  // Without a record there is no job, whatever else still lies there; so it goes first.
  record_record_.Forget();
  identity_record_.Drop();
}

absl::Status KeptJob::Say(uint64_t epoch, const StepWord& word) {
  if (given_up_) return absl::OkStatus();
  KeptWriter writer;
  writer(word);
  return log_.Append(epoch, writer.bytes());
}

absl::Status KeptJob::ReadLog(uint64_t epoch, const std::function<void(StepWord)>& visit) {
  absl::Status status;
  BALLAST_RETURN_IF_ERROR(log_.TakeOver(epoch, [&](absl::string_view entry) {
    StepWord word;
    KeptReader reader(entry);
    reader(word);
    if (!reader.at_end()) status = absl::DataLossError("an entry of the log cannot be read");
    if (status.ok()) visit(std::move(word));
  }));
  return status;
}

void KeptJob::StoreContribution(int64_t chunk, const Contribution& contribution) {
  WordPacker packer;
  packer.Put(contribution.epoch, kEpochBits);
  packer.Put(contribution.attempt, kAttemptBits);
  packer.Put(contribution.next_micro_step, kNextBits);
  packer.Put(contribution.closed ? 1 : 0, kClosedBits);
  packer.Put(static_cast<uint64_t>(contribution.kept), kKeptBits);
  // After the gradient's last byte.
  std::atomic_ref<uint64_t>(reinterpret_cast<uint64_t*>(ledger_->data())[chunk])
      .store(CheckedWord(packer.word, static_cast<uint32_t>(chunk)), std::memory_order_release);
  Stored("a ledger's word");
}

void KeptJob::ClearLedger() {
  for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
    reinterpret_cast<uint64_t*>(ledger_->data())[chunk] =
        CheckedWord(0, static_cast<uint32_t>(chunk));
  }
}

absl::StatusOr<uint64_t> KeptJob::ReadLedger(int64_t chunk) const {
  const uint64_t word = reinterpret_cast<const uint64_t*>(ledger_->data())[chunk];
  const std::optional<uint64_t> value = ValueOf(word, static_cast<uint32_t>(chunk));
  if (value.has_value()) return *value;
  return absl::DataLossError(absl::StrCat(arenas_.WhatIs("ledger"),
                                          " is not as it was stored: what it says of chunk ", chunk,
                                          " has other check bits"));
}

absl::StatusOr<bool> KeptJob::HasContributions(uint64_t epoch) const {
  WordPacker of_epoch;
  of_epoch.Put(epoch, kEpochBits);
  constexpr int kBelow = kAttemptBits + kNextBits + kClosedBits + kKeptBits;
  bool has_any = false;
  for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
    BALLAST_ASSIGN_OR_RETURN(const uint64_t value, ReadLedger(chunk));
    has_any = has_any || value >> kBelow == of_epoch.word;
  }
  return has_any;
}

absl::StatusOr<KeptJob::Contribution> KeptJob::ReadContribution(int64_t chunk, uint64_t epoch,
                                                                uint32_t attempt) const {
  BALLAST_ASSIGN_OR_RETURN(const uint64_t value, ReadLedger(chunk));
  WordUnpacker unpacker = {value};
  Contribution found;
  // In the reverse of the order in which StoreContribution puts them in.
  found.kept = static_cast<GradientStore::Kept>(unpacker.Take(kKeptBits));
  found.closed = unpacker.Take(kClosedBits) != 0;
  found.next_micro_step = static_cast<uint32_t>(unpacker.Take(kNextBits));
  const uint64_t of_attempt = unpacker.Take(kAttemptBits);
  const uint64_t of_epoch = unpacker.Take(kEpochBits);
  const auto low = [](uint64_t value, int bits) { return value & ((uint64_t{1} << bits) - 1); };
  // A word of another epoch or attempt says nothing, which is why none has to be cleared.
  if (of_epoch != low(epoch, kEpochBits) || of_attempt != low(attempt, kAttemptBits))
    return Contribution();
  found.epoch = epoch;
  found.attempt = attempt;
  return found;
}

uint64_t KeptJob::TagOf(uint64_t epoch, uint32_t attempt, uint32_t micro_step_end) {
  WordPacker packer;
  packer.Put(epoch, kEpochBits);
  packer.Put(attempt, kAttemptBits);
  packer.Put(micro_step_end, kNextBits);
  return CheckedWord(packer.word);
}

}  // namespace ballast
