// Writes of state between two steps: by the ranks, each of what it owns, or by an operator.
//
// What is written lies apart until all of it is there. The record's flip that names it is the point
// from which it is the job's state, for a process that takes over, too. The copies that follow may
// be made again. Then the record is flipped once more.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/host/kept_record.h"
#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {
namespace {

constexpr char kWriteLabel[] = "write ";
constexpr char kWriteAlike[] = "all ranks write the same before they begin the step";

absl::Status ReplacedWrite() {
  return WithReason(
      absl::AbortedError("this part of a write of state was given up; bring it again"),
      reason::kStreamReplaced);
}

}  // namespace

absl::StatusOr<std::unique_ptr<StateWriting>> JobImpl::PrepareStateWrite(StateWrite write) {
  BALLAST_RETURN_IF_ERROR(Validate(write, spec()));
  auto writing = std::make_unique<StateWriting>(std::move(write), layout_);
  const int64_t bytes = writing->bytes();
  if (bytes == 0) return writing;
  const std::string what = absl::StrCat("job ", spec().name, ", to write ",
                                        WhatIsWritten(writing->write(), spec()), ",");
  BALLAST_ASSIGN_OR_RETURN(auto reservation, environment_.budget->Reserve(bytes, what));
  const std::string label = absl::StrCat(kWriteLabel, ++last_state_write_);
  std::unique_ptr<Arena> memory;
  if (kept_ != nullptr) {
    BALLAST_RETURN_IF_ERROR(environment_.named_memory->Admit(bytes, what));
    BALLAST_ASSIGN_OR_RETURN(memory,
                             kept_->arenas().Create(bytes, label, ArenaFactory::Touch::kLater));
  } else {
    BALLAST_ASSIGN_OR_RETURN(
        memory, environment_.arenas->Create(bytes, label, ArenaFactory::Touch::kLater));
  }
  writing->UseMemory(label, std::move(memory), std::move(reservation));
  return writing;
}

absl::Status JobImpl::CheckMayWrite(int rank, const StateWrite& write) const {
  if (!first_weights_.complete()) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat(
                          "job ", spec().name,
                          " has no weights yet; first weights come before a write of state")),
                      reason::kNoWeightsYet);
  }
  if (write.step != record_.committed_step || write.number != record_.state_writes + 1) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat(
                          "rank ", rank, " writes state at step ", write.step, ", as write ",
                          write.number, ", but job ", spec().name, " stands at step ",
                          record_.committed_step, " and write ", record_.state_writes)),
                      reason::kOtherStep);
  }
  if (const OpenStep* open = Undecided(); open != nullptr) {
    return WithReason(absl::FailedPreconditionError(
                          absl::StrCat("rank ", rank, " writes ", WhatIsWritten(write, spec()),
                                       " before step ", write.step + 1, " of job ", spec().name,
                                       ", which other ranks have begun without it; ", kWriteAlike)),
                      reason::kOtherSettings);
  }
  if (writing_ != nullptr && writing_->write() != write) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat(
                          "rank ", rank, " writes ", WhatIsWritten(write, spec()), ", and rank ",
                          absl::StrJoin(writing_->RanksThat(true), ", "), " of job ", spec().name,
                          " writes ", WhatIsWritten(writing_->write(), spec()), "; ", kWriteAlike)),
                      reason::kOtherSettings);
  }
  return absl::OkStatus();
}

absl::Status JobImpl::CheckWritesEnded(int rank, uint64_t step) const {
  if (writing_ == nullptr) return absl::OkStatus();
  return WithReason(absl::FailedPreconditionError(absl::StrCat(
                        "rank ", rank, " begins step ", step, " of job ", spec().name,
                        ", before which rank ", absl::StrJoin(writing_->RanksThat(true), ", "),
                        " writes ", WhatIsWritten(writing_->write(), spec()), "; ", kWriteAlike)),
                    reason::kOtherSettings);
}

absl::StatusOr<Job::StateWriter> JobImpl::BeginStateWrite(const RankHolder& holder,
                                                          StateWrite write) {
  BALLAST_RETURN_IF_ERROR(Validate(write, spec()));
  Section section(*this);
  BALLAST_RETURN_IF_ERROR(CheckUsable());
  BALLAST_RETURN_IF_ERROR(CheckGeneration(holder.generation));
  BALLAST_RETURN_IF_ERROR(CheckHolder(holder.rank, holder.process_id));
  // Its answer was lost.
  if (write.number != 0 && write.number == record_.state_writes) return StateWriter{holder.rank, 0};
  BALLAST_RETURN_IF_ERROR(CheckMayWrite(holder.rank, write));
  if (writing_ == nullptr) {
    BALLAST_ASSIGN_OR_RETURN(writing_, PrepareStateWrite(std::move(write)));
  }
  const StateWriter writer = {holder.rank, ++last_state_writer_};
  if (Done<bool> before = writing_->BeginPart(holder.rank, writer.id); before != nullptr) {
    Reply<bool>(std::move(before), ReplacedWrite());
  }
  return writer;
}

absl::Status JobImpl::WriteStateChunk(const StateWriter& writer, int64_t index,
                                      absl::Span<const absl::Span<const std::byte>> payload) {
  const Chunk& chunk = layout_.chunks()[index];
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
  Section section(*this);
  StateWriting::Part* part =
      writing_ == nullptr ? nullptr : writing_->FindPart(writer.rank, writer.id);
  if (part == nullptr) return ReplacedWrite();
  const size_t expected = writing_->write().planes.size() * chunk.elements * sizeof(float);
  if (size_bytes != expected) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a write of state has ", size_bytes, " bytes of chunk ", index, ", expected ", expected));
  }
  const auto place = std::lower_bound(part->missing.begin(), part->missing.end(), index);
  if (place == part->missing.end() || *place != index) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", index,
                                                   " has come already, or has nothing of ",
                                                   WhatIsWritten(writing_->write(), spec())));
  }
  BALLAST_RETURN_IF_ERROR(writing_->WriteChunk(static_cast<int>(index), values));
  part->missing.erase(place);
  return absl::OkStatus();
}

Pending JobImpl::EndStateWrite(const StateWriter& writer, Done<bool> done) {
  Section section(*this);
  if (writer.id == 0) {
    Reply<bool>(std::move(done), true);
    return {};
  }
  StateWriting::Part* part =
      writing_ == nullptr ? nullptr : writing_->FindPart(writer.rank, writer.id);
  if (part == nullptr || !part->missing.empty()) {
    Reply<bool>(std::move(done), part == nullptr
                                     ? ReplacedWrite()
                                     : absl::InvalidArgumentError(absl::StrCat(
                                           part->missing.size(), " chunks of rank ", writer.rank,
                                           "'s part of the write of state have not come")));
    return {};
  }
  part->done = std::move(done);
  if (writing_->complete()) {
    EnterHere(Admission::kWrite, -1,
              [this, self = Self(), writing = writing_](absl::Status admitted)
                  ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                    // A rank's part may have been given up meanwhile.
                    if (writing_ != writing || !writing->complete()) return;
                    writing_ = nullptr;
                    if (admitted.ok()) WriteNow(*writing);
                    for (Done<bool>& each : writing->TakeDones()) {
                      Reply<bool>(std::move(each), admitted.ok() ? absl::StatusOr<bool>(true)
                                                                 : absl::StatusOr<bool>(admitted));
                    }
                    RunAfter([writing] {});  // Its memory goes without the lock.
                  });
  }
  return Pending([weak = weak_from_this(), writer] {
    if (const std::shared_ptr<Job> self = weak.lock()) self->DropStateWrite(writer);
  });
}

void JobImpl::DropStateWrite(const StateWriter& writer) {
  Section section(*this);
  if (writing_ == nullptr || writing_->FindPart(writer.rank, writer.id) == nullptr) return;
  DropPart(writer.rank, absl::CancelledError("the caller has given up waiting"));
}

Pending JobImpl::CommitStateWrite(std::shared_ptr<StateWriting> writing, Done<uint64_t> done) {
  return Enter(Admission::kWrite, -1,
               [this, self = Self(), writing = std::move(writing), done = std::move(done)](
                   absl::Status admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                 if (admitted.ok() && !first_weights_.complete()) {
                   admitted = WithReason(absl::FailedPreconditionError(absl::StrCat(
                                             "job ", spec().name, " has no weights yet")),
                                         reason::kNoWeightsYet);
                 }
                 if (!admitted.ok()) return Reply<uint64_t>(std::move(done), admitted);
                 WriteNow(*writing);
                 Reply<uint64_t>(std::move(done), record_.committed_step);
               });
}

void JobImpl::DropPart(int rank, const absl::Status& why) {
  if (writing_ == nullptr) return;
  Done<bool> done = writing_->DropPart(rank);
  if (done != nullptr) Reply<bool>(std::move(done), why);
  if (!writing_->RanksThat(/*take_part=*/true).empty()) return;
  RunAfter([writing = std::exchange(writing_, nullptr)] {});  // Its memory goes without the lock.
}

void JobImpl::WriteNow(const StateWriting& writing) {
  const StateWrite& write = writing.write();
  record_.writing = KeptWrite{.write = write, .memory = writing.label()};
  if (write.number != 0) record_.state_writes = write.number;
  for (size_t i = 0; i < write.update_counts.size(); ++i) {
    record_.update_counts[write.parameters[i]] = write.update_counts[i];
  }
  Move();
  record_.previous.reset();  // The state before the last step is not what would be gone back to.
  bounds_.clear();           // They are of values that a step has left.
  Keep();
  CopyWritten(writing);
  record_.writing.reset();
  Keep();
  if (write.number != 0) return;  // Ranks may write before each step, and no step has a line.
  Tell(absl::StrCat("has ", WhatIsWritten(write, spec()), " as an operator has written it"));
}

// With the lock, because a rank that begins a step must not find half of it. So no other thread
// helps: the pool's may wait for the lock. To bring the values has taken longer than to copy them.
void JobImpl::CopyWritten(const StateWriting& writing) {
  for (const int chunk : writing.chunks()) {
    auto to = store_->BeginWrite(chunk, Destination::kInPlaceIfFree);
    Check(to.ok(), "a pinned chunk has a place to be written to");
    for (int plane = 0; plane < kMaxPlanes && !to->in_place; ++plane) {
      if (to->from.planes[plane] == nullptr) continue;
      std::copy_n(to->from.planes[plane], layout_.chunks()[chunk].elements, to->to.planes[plane]);
    }
    writing.CopyTo(chunk, to->to);
    Stored("a written chunk");
    store_->Publish(*to, store_->step(chunk));
  }
}

absl::Status JobImpl::TakeOverWrite(std::string& story) {
  if (record_.writing.has_value()) {
    StateWriting writing(record_.writing->write, layout_);
    if (writing.bytes() > 0) {
      BALLAST_ASSIGN_OR_RETURN(auto memory,
                               kept_->arenas().Open(writing.bytes(), record_.writing->memory));
      writing.UseMemory(record_.writing->memory, std::move(memory),
                        environment_.budget->Take(writing.bytes()));
    }
    CopyWritten(writing);
    absl::StrAppend(&story, "; ", WhatIsWritten(writing.write(), spec()),
                    " was being written, and is");
    record_.writing.reset();
    Keep();
  }
  // Of writes that were not whole. Those who bring them bring them again.
  for (const std::string& label : kept_->arenas().Left(kWriteLabel)) {
    environment_.named_memory->Forget(kept_->arenas().NameOf(label));
  }
  return absl::OkStatus();
}

}  // namespace ballast
