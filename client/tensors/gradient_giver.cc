#include "client/tensors/gradient_giver.h"

#include <cstring>
#include <optional>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "client/tensors/stream_copy.h"
#include "client/transport/steady_deadline.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::client {
namespace {

// The job's trainable parameters for which `used` is true.
UsedParameters UsedOf(const JobSpec& job, absl::FunctionRef<bool(size_t)> used) {
  UsedParameters named = {.all = false};
  bool all = true;
  for (size_t p = 0; p < job.layout.parameters.size(); ++p) {
    if (!job.layout.parameters[p].trainable) continue;
    if (used(p)) {
      named.parameters.push_back(static_cast<int>(p));
    } else {
      all = false;
    }
  }
  // By default all are used, which needs no list on the wire.
  return all ? UsedParameters{} : named;
}

std::vector<DType> WireDTypes(const JobSpec& job) {
  std::vector<DType> dtypes;
  for (const GroupSpec& group : job.groups) dtypes.push_back(group.wire_dtype);
  return dtypes;
}

}  // namespace

GradientGiver::GradientGiver(Session& session, const JobSpec& job, int rank, CopyThreads& threads,
                             absl::Duration limit)
    : session_(session),
      job_(job),
      threads_(threads),
      limit_(limit),
      own_chunks_(session.layout().chunks_of_rank(rank)),
      places_(session.layout(), WireDTypes(job), rank) {
  const Layout& layout = session.layout();
  places_.Use([&](int chunk) { return session.gradient_memory(chunk); });
  std::vector<Chunk> chunks(layout.chunks().size());
  std::vector<Parameter> parameters(job.layout.parameters.size());
  for (const int chunk : own_chunks_) {
    own_bytes_ += layout.chunks()[chunk].elements * ElementBytes(chunk);
    layout.VisitParts(chunk, [&](const ChunkPart& part) {
      parameters[part.parameter].parts.push_back({.chunk = chunk,
                                                  .part_offset = part.part_offset,
                                                  .chunk_offset = part.chunk_offset,
                                                  .elements = part.elements});
      ++chunks[chunk].parameters;
      return true;
    });
  }
  chunks_ = std::move(chunks);
  parameters_ = std::move(parameters);
}

void GradientGiver::Reset() {
  MutexLock lock(mutex_);
  // What the writer has, queued or in hand, is of the old attempt, which it notices by the number.
  written_status_ = absl::OkStatus();
  ++attempt_;
  // What parameters and chunks have is reset by Enter, when the next micro-step opens.
  open_ = false;
  next_micro_step_ = 0;
  done_.NotifyAll();  // An End of the old attempt fails.
}

absl::StatusOr<GradientGiver::PlacesOfGradient> GradientGiver::Places(uint32_t micro_step,
                                                                      size_t parameter) {
  BALLAST_RETURN_IF_ERROR(CheckParameter(parameter));
  MutexLock lock(mutex_);
  BALLAST_RETURN_IF_ERROR(Enter(micro_step));
  Parameter& given = parameters_[parameter];
  if (WasGiven(given) || ending_) return GivenAlready(parameter);
  // A parameter that has places already gets the same ones again.
  BALLAST_RETURN_IF_ERROR(TakePlaces(given));
  PlacesOfGradient places = {.attempt = attempt_};
  for (const Part& part : given.parts) {
    places.places.push_back(
        {.data = chunks_[part.chunk].place.data() + part.chunk_offset * ElementBytes(part.chunk),
         .offset = part.part_offset,
         .elements = part.elements});
  }
  return places;
}

absl::Status GradientGiver::Give(uint32_t micro_step, size_t parameter, const void* gradient,
                                 Last last) {
  BALLAST_RETURN_IF_ERROR(CheckParameter(parameter));
  MutexLock lock(mutex_);
  BALLAST_RETURN_IF_ERROR(Enter(micro_step));
  Parameter& given = parameters_[parameter];
  if (!WasGiven(given) && !ending_) return GiveParameter(given, gradient, last);
  if (given.waits_for_push) {  // It was given, and the push waited for longer than the limit.
    BALLAST_RETURN_IF_ERROR(PushReady(last));
    given.waits_for_push = false;
    return absl::OkStatus();
  }
  return GivenAlready(parameter);
}

absl::Status GradientGiver::GiveParameter(Parameter& parameter, const void* gradient, Last last) {
  if (gradient == nullptr && parameter.given != Given::kHasPlaces) {
    return absl::InvalidArgumentError("a gradient that has no places yet was given as written");
  }
  BALLAST_RETURN_IF_ERROR(TakePlaces(parameter));
  if (gradient != nullptr) {
    const auto bytes_of = [&](const Part& part) {
      return part.elements * ElementBytes(part.chunk);
    };
    int64_t bytes = 0;
    for (const Part& part : parameter.parts) bytes += bytes_of(part);
    // mutex_ is held, so that no Reset gives the places to another attempt meanwhile.
    BALLAST_RETURN_IF_ERROR(threads_.ForEach(
        static_cast<int64_t>(parameter.parts.size()), bytes,
        [&](int64_t i) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
          const Part& part = parameter.parts[i];
          const int64_t size = ElementBytes(part.chunk);
          StreamCopy(chunks_[part.chunk].place.data() + part.chunk_offset * size,
                     static_cast<const std::byte*>(gradient) + part.part_offset * size,
                     bytes_of(part));
          return absl::OkStatus();
        }));
  }
  // From here on the gradient is given, and the caller's memory is free. A push that waits for too
  // long is only repeated: nothing is copied or counted twice.
  for (const Part& part : parameter.parts) {
    if (--chunks_[part.chunk].missing == 0) ready_.push_back(part.chunk);
  }
  parameter.given = Given::kYes;
  done_.NotifyAll();
  const absl::Status pushed = PushReady(last);
  parameter.waits_for_push = absl::IsDeadlineExceeded(pushed);
  return pushed;
}

void GradientGiver::Written(size_t parameter, uint64_t attempt, Last last) {
  writer_.Run([this, writing = Writing{.parameter = parameter, .attempt = attempt, .last = last}] {
    PushWritten(writing);
  });
}

void GradientGiver::PushWritten(const Writing& writing) {
  bool waits = true;
  while (waits) {
    absl::Status status = TryToPush(writing);
    MutexLock lock(mutex_);
    // The push is of an attempt that is over, and so is the error.
    if (writing.attempt != attempt_) return;
    // A full window is waited for again, as the caller of Give does it.
    waits = absl::IsDeadlineExceeded(status);
    if (!waits) written_status_.Update(status);
    done_.NotifyAll();
  }
}

absl::Status GradientGiver::TryToPush(const Writing& writing) {
  MutexLock lock(mutex_);
  if (writing.attempt != attempt_ || !open_) return absl::OkStatus();
  Parameter& parameter = parameters_[writing.parameter];
  // It was counted before, and its push waited for too long.
  if (WasGiven(parameter)) return PushReady(writing.last);
  return GiveParameter(parameter, nullptr, writing.last);
}

absl::Status GradientGiver::GiveAll(uint32_t micro_step, const void* const* gradients, Last last) {
  return EndWith(micro_step, gradients, last);
}

absl::Status GradientGiver::End(uint32_t micro_step, Last last) {
  return EndWith(micro_step, nullptr, last);
}

absl::Status GradientGiver::EndWith(uint32_t micro_step, const void* const* gradients, Last last) {
  const auto deadline = SteadyDeadline(limit_);
  const auto all_written = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (const Parameter& parameter : parameters_) {
      if (parameter.given == Given::kHasPlaces) return false;
    }
    return true;
  };
  std::optional<uint64_t> attempt;  // That this ends.
  const auto enter = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> absl::Status {
    if (attempt.has_value() && *attempt != attempt_) {
      return absl::FailedPreconditionError(
          absl::StrCat("micro-step ", micro_step, " was discarded while it was being ended"));
    }
    attempt = attempt_;
    return Enter(micro_step);
  };
  MutexLock lock(mutex_);
  for (;;) {
    // First: what the writer could not give would be waited for in vain.
    BALLAST_RETURN_IF_ERROR(written_status_);
    // After each wait, too, because the wait gives up mutex_ and another thread may discard.
    BALLAST_RETURN_IF_ERROR(enter());
    if (all_written()) return Finish(gradients, last);
    if (!done_.WaitUntil(mutex_, deadline)) {
      return absl::DeadlineExceededError("a gradient has not been written to its places yet");
    }
  }
}

absl::Status GradientGiver::Finish(const void* const* gradients, Last last) {
  const auto gives = [&](size_t p) {
    return gradients != nullptr && gradients[p] != nullptr && job_.layout.parameters[p].trainable;
  };
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const Given given = parameters_[p].given;
    const bool differs = given == Given::kAtOnce ? !gives(p) : given == Given::kNot && gives(p);
    // An end that is repeated after DEADLINE_EXCEEDED has to name the same gradients: some chunks
    // have left with those of the first call.
    if (ending_ && differs) {
      return absl::InvalidArgumentError(
          absl::StrCat("the end of micro-step ", micro_step_, " has begun ",
                       given == Given::kNot ? "without" : "with", " the gradient of parameter ",
                       job_.layout.parameters[p].name, "; repeat the same call"));
    }
  }
  BALLAST_RETURN_IF_ERROR(PushReady(last));
  for (size_t p = 0; p < parameters_.size(); ++p) {
    if (parameters_[p].given == Given::kNot && gives(p)) parameters_[p].given = Given::kAtOnce;
  }
  // From now on no parameter may be given one by one: chunks leave with zeros for the others.
  ending_ = true;
  BALLAST_RETURN_IF_ERROR(threads_.ForEach(static_cast<int64_t>(own_chunks_.size()),
                                           gradients == nullptr ? 0 : own_bytes_,
                                           [&](int64_t i) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                                             return FinishChunk(own_chunks_[i], gradients, last);
                                           }));
  for (Parameter& parameter : parameters_) {
    if (parameter.given == Given::kAtOnce) parameter.given = Given::kYes;
  }
  const absl::Span<const Parameter> parameters = parameters_;
  // After all chunks. If it fails, the micro-step stays open: the same call again finds every chunk
  // pushed, and only has this to do.
  BALLAST_RETURN_IF_ERROR(session_.EndMicroStep(
      micro_step_, UsedOf(job_, [&](size_t p) { return parameters[p].given == Given::kYes; })));
  open_ = false;
  next_micro_step_ = micro_step_ + 1;
  return absl::OkStatus();
}

absl::Status GradientGiver::FinishChunk(int index, const void* const* gradients, Last last) {
  // Several threads are here at once, each with a chunk of its own, while the thread in Finish
  // holds mutex_.
  Chunk& chunk = chunks_[index];
  if (chunk.stage == Stage::kPushed) return absl::OkStatus();
  const absl::Span<const Parameter> parameters = parameters_;
  const auto visit_parts = [&](absl::FunctionRef<void(const ChunkPart&, Given)> visit) {
    session_.layout().VisitParts(index, [&](const ChunkPart& part) {
      visit(part, parameters[part.parameter].given);
      return true;
    });
  };
  // A chunk that has no place yet, and gets no gradient now, leaves as empty, without a byte.
  bool has_gradient = chunk.stage == Stage::kHasPlace;
  visit_parts([&](const ChunkPart&, Given given) { has_gradient |= given == Given::kAtOnce; });
  if (has_gradient) {
    BALLAST_RETURN_IF_ERROR(TakePlace(index));
    const int64_t size = ElementBytes(index);
    visit_parts([&](const ChunkPart& part, Given given) {
      std::byte* to = chunk.place.data() + part.chunk_offset * size;
      // The place still has what an earlier micro-step left there.
      if (given == Given::kNot) std::memset(to, 0, part.elements * size);
      if (given != Given::kAtOnce) return;
      const auto* from = static_cast<const std::byte*>(gradients[part.parameter]);
      StreamCopy(to, from + part.part_offset * size, part.elements * size);
    });
  }
  return PushChunk(index, last);
}

absl::Status GradientGiver::GivenAlready(size_t parameter) const {
  return absl::InvalidArgumentError(
      absl::StrCat("parameter ", job_.layout.parameters[parameter].name,
                   WasGiven(parameters_[parameter]) ? " was given already in micro-step "
                                                    : " comes after the end of micro-step ",
                   micro_step_, "; end it first"));
}

absl::Status GradientGiver::CheckParameter(size_t parameter) const {
  const auto& parameters = job_.layout.parameters;
  if (parameter >= parameters.size()) {
    return absl::InvalidArgumentError(absl::StrCat("parameter ", parameter,
                                                   " does not exist; the job has ",
                                                   parameters.size(), " parameters"));
  }
  if (parameters[parameter].trainable) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("parameter ", parameters[parameter].name, " is frozen and takes no gradient"));
}

absl::Status GradientGiver::Enter(uint32_t micro_step) {
  if (open_) {
    if (micro_step == micro_step_) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("a gradient of micro-step ", micro_step,
                                                   " came before micro-step ", micro_step_,
                                                   " was ended"));
  }
  if (micro_step < next_micro_step_) {
    return absl::InvalidArgumentError(
        absl::StrCat("micro-step ", micro_step, " was ended already"));
  }
  open_ = true;
  ending_ = false;
  micro_step_ = micro_step;
  ready_.clear();
  for (Parameter& parameter : parameters_) {
    parameter.given = Given::kNot;
    parameter.waits_for_push = false;
  }
  for (const int index : own_chunks_) {
    Chunk& chunk = chunks_[index];
    chunk.stage = Stage::kIdle;
    chunk.missing = chunk.parameters;
  }
  return absl::OkStatus();
}

absl::Status GradientGiver::TakePlaces(Parameter& parameter) {
  if (parameter.given == Given::kHasPlaces) return absl::OkStatus();
  for (const Part& part : parameter.parts) BALLAST_RETURN_IF_ERROR(TakePlace(part.chunk));
  parameter.given = Given::kHasPlaces;
  return absl::OkStatus();
}

absl::Status GradientGiver::TakePlace(int index) {
  Chunk& chunk = chunks_[index];
  if (chunk.stage != Stage::kIdle) return absl::OkStatus();
  // With mutex_ held: the release of a push takes none of this object's locks, so the wait can end.
  BALLAST_ASSIGN_OR_RETURN(chunk.place, places_.Await(index, limit_));
  const int64_t size = ElementBytes(index);
  // The service refuses a step whose padding is not zero, and a place may hold anything.
  for (const ChunkPiece& padding : session_.layout().padding_of(index)) {
    std::memset(chunk.place.data() + padding.chunk_offset * size, 0, padding.elements * size);
  }
  chunk.stage = Stage::kHasPlace;
  return absl::OkStatus();
}

absl::Status GradientGiver::PushReady(Last last) {
  while (!ready_.empty()) {
    BALLAST_RETURN_IF_ERROR(PushChunk(ready_.back(), last));
    // Only now: what could not be pushed in time is the first of the next call.
    ready_.pop_back();
  }
  return absl::OkStatus();
}

absl::Status GradientGiver::PushChunk(int index, Last last) {
  Chunk& chunk = chunks_[index];
  GradientPush push = {.chunk = index,
                       .micro_step_begin = micro_step_,
                       .micro_step_end = micro_step_ + 1,
                       .final = last == Last::kFinal,
                       .may_guess = last == Last::kMayGuess,
                       .empty = chunk.stage == Stage::kIdle};
  if (!push.empty) {
    push.payload = chunk.place;
    // Before Push, which may call it before it returns, and calls it where it fails.
    push.released = places_.Lend(index);
  }
  BALLAST_RETURN_IF_ERROR(session_.Push(std::move(push)));
  // Only after a push that succeeded: one that waited for too long is made again.
  chunk.stage = Stage::kPushed;
  return absl::OkStatus();
}

int64_t GradientGiver::ElementBytes(int chunk) const {
  return SizeBytes(job_.groups[session_.layout().chunks()[chunk].group].wire_dtype);
}

}  // namespace ballast::client
