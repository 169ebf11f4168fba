#include "cpu_optimizer_service/job/state/state_writes.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/host/kept_record.h"

namespace ballast {
namespace {

constexpr char kWriteLabel[] = "write ";
constexpr char kWriteAlike[] = "all ranks must write the same before they begin the step";

absl::Status ReplacedWrite() {
  return WithReason(absl::AbortedError("this part of a state write was dropped; send it again"),
                    reason::kStreamReplaced);
}

}  // namespace

absl::StatusOr<std::unique_ptr<StateWriting>> StateWrites::Prepare(StateWrite write) {
  BALLAST_RETURN_IF_ERROR(Validate(write, core_.spec()));
  auto writing = std::make_unique<StateWriting>(std::move(write), core_.layout);
  const int64_t bytes = writing->bytes();
  if (bytes == 0) return writing;
  const std::string what = absl::StrCat("job ", core_.spec().name, ", to write ",
                                        WhatIsWritten(writing->write(), core_.spec()), ",");
  BALLAST_ASSIGN_OR_RETURN(auto reservation, core_.environment.budget->Reserve(bytes, what));
  const std::string label = absl::StrCat(kWriteLabel, ++last_memory_);
  std::unique_ptr<Arena> memory;
  if (journal_.kept() != nullptr) {
    BALLAST_RETURN_IF_ERROR(core_.environment.named_memory->Admit(bytes, what));
    BALLAST_ASSIGN_OR_RETURN(
        memory, journal_.kept()->arenas().Create(bytes, label, ArenaFactory::Touch::kLater));
  } else {
    BALLAST_ASSIGN_OR_RETURN(
        memory, core_.environment.arenas->Create(bytes, label, ArenaFactory::Touch::kLater));
  }
  writing->UseMemory(label, std::move(memory), std::move(reservation));
  return writing;
}

absl::Status StateWrites::CheckMayBegin(int rank, const StateWrite& write) const {
  if (!core_.first_weights.complete()) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat(
                          "job ", core_.spec().name,
                          " has no weights yet; upload first weights before a state write")),
                      reason::kNoWeightsYet);
  }
  if (write.step != core_.record.committed_step || write.number != core_.record.state_writes + 1) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat(
                          "rank ", rank, " writes state at step ", write.step, ", as write ",
                          write.number, ", but job ", core_.spec().name, " is at step ",
                          core_.record.committed_step, " and write ", core_.record.state_writes)),
                      reason::kOtherStep);
  }
  if (machine_.undecided() != nullptr) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat(
                          "rank ", rank, " writes ", WhatIsWritten(write, core_.spec()),
                          " before step ", write.step + 1, " of job ", core_.spec().name,
                          ", but other ranks have begun it without that write; ", kWriteAlike)),
                      reason::kOtherSettings);
  }
  if (writing_ != nullptr && writing_->write() != write) {
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat(
            "rank ", rank, " writes ", WhatIsWritten(write, core_.spec()), ", but rank ",
            absl::StrJoin(writing_->RanksThat(true), ", "), " of job ", core_.spec().name,
            " writes ", WhatIsWritten(writing_->write(), core_.spec()), "; ", kWriteAlike)),
        reason::kOtherSettings);
  }
  return absl::OkStatus();
}

absl::Status StateWrites::CheckEnded(int rank, uint64_t step) const {
  if (writing_ == nullptr) return absl::OkStatus();
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat(
          "rank ", rank, " begins step ", step, " of job ", core_.spec().name, ", but rank ",
          absl::StrJoin(writing_->RanksThat(true), ", "), " writes ",
          WhatIsWritten(writing_->write(), core_.spec()), " before it; ", kWriteAlike)),
      reason::kOtherSettings);
}

absl::StatusOr<Job::StateWriter> StateWrites::Begin(const RankHolder& holder, StateWrite write) {
  BALLAST_RETURN_IF_ERROR(Validate(write, core_.spec()));
  JobCore::Section section(core_);
  BALLAST_RETURN_IF_ERROR(core_.CheckUsable());
  BALLAST_RETURN_IF_ERROR(members_.CheckGeneration(holder.generation));
  BALLAST_RETURN_IF_ERROR(members_.CheckHolder(holder.rank, holder.process_id));
  // Its answer was lost.
  if (write.number != 0 && write.number == core_.record.state_writes)
    return StateWriter{holder.rank, 0};
  BALLAST_RETURN_IF_ERROR(CheckMayBegin(holder.rank, write));
  if (writing_ == nullptr) {
    BALLAST_ASSIGN_OR_RETURN(writing_, Prepare(std::move(write)));
  }
  const StateWriter writer = {holder.rank, ++last_writer_};
  if (Done<bool> before = writing_->BeginPart(holder.rank, writer.id); before != nullptr) {
    core_.Reply<bool>(std::move(before), ReplacedWrite());
  }
  return writer;
}

absl::Status StateWrites::WriteChunk(const StateWriter& writer, int64_t index,
                                     absl::Span<const absl::Span<const std::byte>> payload) {
  const Chunk& chunk = core_.layout.chunks()[index];
  size_t size_bytes = 0;
  for (const auto& piece : payload) size_bytes += piece.size();
  // Gathered without the lock.
  std::vector<float> values((size_bytes + sizeof(float) - 1) / sizeof(float));
  auto* out = reinterpret_cast<std::byte*>(values.data());
  for (const auto& piece : payload) {
    if (!piece.empty()) std::memcpy(out, piece.data(), piece.size());
    out += piece.size();
  }
  if (writer.id == 0) return absl::OkStatus();
  JobCore::Section section(core_);
  StateWriting::Part* part =
      writing_ == nullptr ? nullptr : writing_->FindPart(writer.rank, writer.id);
  if (part == nullptr) return ReplacedWrite();
  const size_t expected = writing_->write().planes.size() * chunk.elements * sizeof(float);
  if (size_bytes != expected) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a state write has ", size_bytes, " bytes of chunk ", index, ", expected ", expected));
  }
  const auto place = std::lower_bound(part->missing.begin(), part->missing.end(), index);
  if (place == part->missing.end() || *place != index) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", index,
                                                   " has arrived already, or has nothing of ",
                                                   WhatIsWritten(writing_->write(), core_.spec())));
  }
  BALLAST_RETURN_IF_ERROR(writing_->WriteChunk(static_cast<int>(index), values));
  part->missing.erase(place);
  return absl::OkStatus();
}

Pending StateWrites::End(const StateWriter& writer, Done<bool> done) {
  JobCore::Section section(core_);
  if (writer.id == 0) {
    core_.Reply<bool>(std::move(done), true);
    return {};
  }
  StateWriting::Part* part =
      writing_ == nullptr ? nullptr : writing_->FindPart(writer.rank, writer.id);
  if (part == nullptr || !part->missing.empty()) {
    core_.Reply<bool>(std::move(done),
                      part == nullptr ? ReplacedWrite()
                                      : absl::InvalidArgumentError(absl::StrCat(
                                            part->missing.size(), " chunks of rank ", writer.rank,
                                            "'s part of the state write have not arrived")));
    return {};
  }
  if (!writing_->refused().ok()) {
    core_.Reply<bool>(std::move(done), writing_->refused());
    DropPart(writer.rank, writing_->refused());
    return {};
  }
  part->done = std::move(done);
  if (writing_->complete()) {
    core_.EnterHere(Admission::kWrite, -1,
                    [this, keep = core_.KeepAlive(), writing = writing_](absl::Status admitted)
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
                          // A rank's part may have been given up meanwhile.
                          if (writing_ != writing || !writing->complete()) return;
                          writing_ = nullptr;
                          if (admitted.ok()) WriteNow(*writing);
                          for (Done<bool>& each : writing->TakeDones()) {
                            core_.Reply<bool>(std::move(each),
                                              admitted.ok() ? absl::StatusOr<bool>(true)
                                                            : absl::StatusOr<bool>(admitted));
                          }
                          core_.RunAfter([writing] {});  // Its memory goes without the lock.
                        });
  }
  return Pending([this, weak = std::weak_ptr(core_.KeepAlive()), writer] {
    if (const auto keep = weak.lock(); keep != nullptr) Drop(writer);
  });
}

void StateWrites::Drop(const StateWriter& writer) {
  JobCore::Section section(core_);
  if (writing_ == nullptr || writing_->FindPart(writer.rank, writer.id) == nullptr) return;
  DropPart(writer.rank, absl::CancelledError("the caller has given up waiting"));
}

Pending StateWrites::Commit(std::shared_ptr<StateWriting> writing, Done<uint64_t> done) {
  return core_.Enter(Admission::kWrite, -1,
                     [this, keep = core_.KeepAlive(), writing = std::move(writing),
                      done = std::move(done)](absl::Status admitted)
                         ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
                           if (admitted.ok()) admitted = view_.CheckThere();
                           if (!admitted.ok())
                             return core_.Reply<uint64_t>(std::move(done), admitted);
                           WriteNow(*writing);
                           core_.Reply<uint64_t>(std::move(done), core_.record.committed_step);
                         });
}

void StateWrites::DropPart(int rank, const absl::Status& why) {
  if (writing_ == nullptr) return;
  Done<bool> done = writing_->DropPart(rank);
  if (done != nullptr) core_.Reply<bool>(std::move(done), why);
  if (!writing_->RanksThat(/*take_part=*/true).empty()) return;
  core_.RunAfter(
      [writing = std::exchange(writing_, nullptr)] {});  // Its memory goes without the lock.
}

void StateWrites::Refuse(const absl::Status& why) {
  writing_->Refuse(why);
  for (int rank = 0; rank < members_.table.size() && writing_ != nullptr; ++rank) {
    if (writing_->HasEnded(rank)) DropPart(rank, why);
  }
}

void StateWrites::WriteNow(const StateWriting& writing) {
  const StateWrite& write = writing.write();
  core_.record.writing = KeptWrite{.write = write, .memory = writing.label()};
  if (write.number != 0) core_.record.state_writes = write.number;
  for (size_t i = 0; i < write.update_counts.size(); ++i) {
    core_.record.update_counts[write.parameters[i]] = write.update_counts[i];
  }
  for (const int parameter : write.parameters) {
    int64_t& count = core_.record.update_counts[parameter];
    if (HoldsFirstUpdate(write)) count = std::max<int64_t>(count, 1);
  }
  core_.Move();
  core_.record.previous
      .reset();          // The state before the last step is not what would be gone back to.
  core_.bounds.clear();  // They are of values that a step has left.
  journal_.Keep();
  CopyWritten(writing);
  core_.record.writing.reset();
  journal_.Keep();
  if (write.number != 0) return;  // Ranks may write before each step, and no step has a line.
  core_.Tell(
      absl::StrCat("has ", WhatIsWritten(write, core_.spec()), " as an operator has written it"));
}

// With the lock, because a rank that begins a step must not find half of it. So no other thread
// helps: the pool's may wait for the lock. To bring the values has taken longer than to copy them.
void StateWrites::CopyWritten(const StateWriting& writing) {
  for (const int chunk : writing.chunks()) {
    auto to = memory_.store->BeginWrite(chunk, Destination::kInPlaceIfFree);
    Check(to.ok(), "a pinned chunk has a place to be written to");
    if (!to->in_place) CopyStored(to->from, to->to, 0, core_.layout.chunks()[chunk].elements);
    writing.CopyTo(chunk, to->to);
    Stored("a written chunk");
    memory_.store->Publish(*to, memory_.store->step(chunk));
  }
}

absl::Status StateWrites::TakeOver(std::string& story) {
  if (core_.record.writing.has_value()) {
    StateWriting writing(core_.record.writing->write, core_.layout);
    if (writing.bytes() > 0) {
      BALLAST_ASSIGN_OR_RETURN(auto memory, journal_.kept()->arenas().Open(
                                                writing.bytes(), core_.record.writing->memory));
      writing.UseMemory(core_.record.writing->memory, std::move(memory),
                        core_.environment.budget->Take(writing.bytes()));
    }
    CopyWritten(writing);
    absl::StrAppend(&story, "; ", WhatIsWritten(writing.write(), core_.spec()),
                    " was being written, and is");
    core_.record.writing.reset();
    journal_.Keep();
  }
  // Of writes that were not whole. Those who bring them bring them again.
  for (const std::string& label : journal_.kept()->arenas().Left(kWriteLabel)) {
    core_.environment.named_memory->Forget(journal_.kept()->arenas().NameOf(label));
  }
  return absl::OkStatus();
}

}  // namespace ballast
