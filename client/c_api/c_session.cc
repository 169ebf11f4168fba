// client/ballast.h over client::Session.
#include "client/c_api/c_session.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/ballast.h"
#include "client/c_api/c_call.h"
#include "client/c_api/c_options.h"
#include "client/home.h"
#include "client/session.h"
#include "client/tensors/gradient_giver.h"
#include "client/tensors/stream_copy.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"

namespace ballast::client {

absl::Status CheckSession(const ballast_session* session) {
  BALLAST_RETURN_IF_ERROR(CheckGiven(session, "ballast_session"));
  if (session->process == getpid()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this session belongs to the process that opened it, and this one is its fork; start "
      "processes that train by spawn or exec");
}

absl::StatusOr<Chunk> FindOwnChunk(const ballast_session& session, int32_t chunk) {
  const absl::Span<const Chunk> chunks = session.session->layout().chunks();
  if (chunk < 0 || chunk >= static_cast<int64_t>(chunks.size())) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", chunk, " is not one of rank ",
                                                   session.options.rank,
                                                   "; ballast_chunks lists them"));
  }
  return chunks[chunk];
}

namespace {

absl::Status CheckCount(const ballast_session& session, size_t count) {
  const size_t parameters = session.options.job.layout.parameters.size();
  if (count == parameters) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(count, " pointers were given for ", parameters, " parameters"));
}

absl::Status CheckFirstWeights(const ballast_session& session, const float* const* weights,
                               size_t count) {
  BALLAST_RETURN_IF_ERROR(CheckGiven(weights, "weights"));
  BALLAST_RETURN_IF_ERROR(CheckCount(session, count));
  const std::vector<bool> owned = OwnedBy(session.options);
  for (size_t p = 0; p < count; ++p) {
    if (weights[p] == nullptr && owned[p]) {
      return absl::InvalidArgumentError(absl::StrCat(
          "there are no weights of parameter ", session.options.job.layout.parameters[p].name));
    }
  }
  return absl::OkStatus();
}

// Through the upload, whose call is cancelled on the way.
struct EndedByCaller {
  int32_t status;
};

// Has the caller's function write a part of a plane (ballast_plane) to its place.
using AskCaller = absl::FunctionRef<void(const ChunkPart& part, int32_t plane, float* out)>;

// CANCELLED where that function returns another status than 0; `what` it writes.
absl::Status SendWhatItWrites(ballast_values values, void* context, absl::string_view what,
                              absl::FunctionRef<absl::Status(AskCaller ask)> send) {
  if (values == nullptr) return absl::InvalidArgumentError("values is null");
  try {
    return send([&](const ChunkPart& part, int32_t plane, float* out) {
      const int32_t ended =
          values(context, part.parameter, plane, part.part_offset, part.elements, out);
      if (ended != 0) throw EndedByCaller{ended};
    });
  } catch (const EndedByCaller& by) {
    return absl::CancelledError(
        absl::StrCat("the function that writes ", what, " returned ", by.status));
  }
}

// Writes a plane of a chunk's part, of ballast_plane's order, to its place.
using PartWriter = absl::FunctionRef<void(const ChunkPart& part, size_t plane, float* out)>;

// From whole parameters, zeros for those that are null.
void CopyPart(const float* const* parameters, const ChunkPart& part, float* out) {
  if (parameters[part.parameter] == nullptr) return;
  std::memcpy(out, parameters[part.parameter] + part.part_offset, part.elements * sizeof(float));
}

// Weights alone, if the state is of step 0.
absl::Status UploadParts(const ballast_session& session, const FirstState& state,
                         PartWriter write) {
  const Layout& layout = session.session->layout();
  const auto fill = [&](int chunk, absl::Span<float> out) {
    // Padding has to be zero, and so are moments whose pointer is null.
    std::fill(out.begin(), out.end(), 0.0f);
    const size_t elements = layout.chunks()[chunk].elements;
    for (size_t plane = 0; plane * elements < out.size(); ++plane) {
      layout.VisitParts(chunk, [&](const ChunkPart& part) {
        write(part, plane, out.data() + plane * elements + part.chunk_offset);
        return true;
      });
    }
  };
  return state.step == 0 ? session.session->UploadWeights(fill)
                         : session.session->UploadState(state, fill);
}

// The chunk's weights to the places of the parameters that have a part in it.
void CopyWeights(const ballast_session& session, int chunk) {
  // Called by several threads at once, for different chunks, which have no element in common.
  const std::byte* shard = session.session->weights_memory(chunk).data();
  const Layout& layout = session.session->layout();
  const int64_t size =
      SizeBytes(session.options.job.groups[layout.chunks()[chunk].group].return_dtype);
  layout.VisitParts(chunk, [&](const ChunkPart& part) {
    auto* to = static_cast<std::byte*>(session.weights[part.parameter]);
    StreamCopy(to + part.part_offset * size, shard + part.chunk_offset * size,
               part.elements * size);
    return true;
  });
}

// INVALID_ARGUMENT if there is no pointer to a parameter of which this rank owns elements that have
// directions.
template <typename Pointer>
absl::Status CheckMatrices(const ballast_session& session, const Pointer* matrices, size_t count) {
  BALLAST_RETURN_IF_ERROR(CheckGiven(matrices, "the array of pointers"));
  BALLAST_RETURN_IF_ERROR(CheckCount(session, count));
  const JobSpec& job = session.options.job;
  const std::vector<bool> owned = OwnedBy(session.options);
  for (size_t p = 0; p < count; ++p) {
    const ParameterSpec& parameter = job.layout.parameters[p];
    if (matrices[p] == nullptr && owned[p] &&
        HasTwoRounds(job.groups[parameter.group].hyper_parameters.rule)) {
      return absl::InvalidArgumentError(
          absl::StrCat("there is no pointer for parameter ", parameter.name));
    }
  }
  return absl::OkStatus();
}

constexpr int64_t kDirectionBytes = SizeBytes(DType::kBFloat16);

std::unique_ptr<WeightCopies> CopiesOf(ballast_session& session) {
  const Layout& layout = session.session->layout();
  const absl::Span<const int> chunks = layout.chunks_of_rank(session.options.rank);
  int64_t bytes = 0;
  session.chunks_of.resize(session.options.job.layout.parameters.size());
  for (const int chunk : chunks) {
    const Chunk& of = layout.chunks()[chunk];
    bytes += of.elements * SizeBytes(session.options.job.groups[of.group].return_dtype);
    layout.VisitParts(chunk, [&](const ChunkPart& part) {
      session.chunks_of[part.parameter].push_back(chunk);
      return true;
    });
  }
  return std::make_unique<WeightCopies>(session.threads, static_cast<int64_t>(chunks.size()), bytes,
                                        [&session](int chunk) { CopyWeights(session, chunk); });
}

void KeepUnused(ballast_session& session, const std::vector<std::string>& names) {
  session.unused.clear();
  for (const std::string& name : names) {
    const int parameter = session.session->layout().FindParameter(name);
    if (parameter >= 0) session.unused.push_back(static_cast<size_t>(parameter));
  }
}

// Votes as `decide` does it, and tells what is decided.
int32_t CDecide(ballast_session* session, const ballast_ballot* ballot, ballast_decision* decision,
                absl::FunctionRef<absl::StatusOr<StepDecision>(const StepVote&)> decide) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckStructure(decision, "ballast_decision"));
    BALLAST_ASSIGN_OR_RETURN(const StepVote vote, ReadBallot(ballot, session->options.job.groups));
    BALLAST_ASSIGN_OR_RETURN(const StepDecision taken, decide(vote));
    CWrite(ballast_decision{.size = 0,
                            .step = taken.step,
                            .applied = taken.applied,
                            .norm = taken.norm,
                            .clip_coefficient = taken.clip_coefficient},
           decision);
    KeepUnused(*session, taken.unused_parameters);
    if (!taken.applied) Said() = {taken.skip_reason, ""};
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace ballast::client

using namespace ballast::client;  // The functions below are all that this file exports.

extern "C" {

int32_t ballast_api_version(void) { return BALLAST_API_VERSION; }

const char* ballast_message(void) { return Said().message.c_str(); }

const char* ballast_reason(void) { return Said().reason.c_str(); }

int32_t ballast_open(const ballast_options* options, ballast_session** out) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckStructure(options, "ballast_options"));
    BALLAST_RETURN_IF_ERROR(CheckGiven(out, "session"));
    *out = nullptr;
    const ballast_options given = CRead(options);
    BALLAST_RETURN_IF_ERROR(CheckGiven(given.service, "ballast_options.service"));
    auto session = std::make_unique<ballast_session>();
    BALLAST_ASSIGN_OR_RETURN(session->options, ReadOptions(given));
    session->options.takes_steps = given.takes_no_steps == 0;
    const auto& parameters = session->options.job.layout.parameters;
    BALLAST_RETURN_IF_ERROR(CheckGiven(given.weights, "ballast_options.weights"));
    session->weights.assign(given.weights, given.weights + parameters.size());
    const std::vector<bool> owned = OwnedBy(session->options);
    for (size_t p = 0; p < parameters.size(); ++p) {
      if (session->weights[p] == nullptr && owned[p]) {
        return absl::InvalidArgumentError(
            absl::StrCat("ballast_options.weights is null for parameter ", parameters[p].name));
      }
    }
    // options.weights stays null: weights come to the session's memory, and threads copy them
    // from there. `copies` is made after the session, which gets no weights before the caller
    // asks for them or begins a step.
    session->options.on_weights = [raw = session.get()](int chunk) { raw->copies->Add(chunk); };
    BALLAST_RETURN_IF_ERROR(BeginTransport());
    BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel,
                             ConnectHome(given.service, session->options.rank, session->options.job,
                                         std::min(absl::Seconds(30), session->options.join_timeout),
                                         ReadCredentials(given)));
    BALLAST_ASSIGN_OR_RETURN(session->session, Session::Open(channel, session->options));
    session->gradients = std::make_unique<GradientGiver>(*session->session, session->options.job,
                                                         session->options.rank, session->threads,
                                                         session->options.seal_timeout);
    session->copies = CopiesOf(*session);
    *out = session.release();
    return absl::OkStatus();
  });
}

void ballast_close(ballast_session* session) {
  // The threads of a parent's session do not exist in its fork: nothing there could end them.
  if (session == nullptr || session->process != getpid()) return;
  CCall([&] {
    delete session;
    return absl::OkStatus();
  });
}

int32_t ballast_get_info(const ballast_session* session, ballast_info* info) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckStructure(info, "ballast_info"));
    const Session& given = *session->session;
    CWrite(ballast_info{.size = 0,
                        .committed_step = given.committed_step(),
                        .generation_epoch = given.generation().epoch,
                        .generation = given.generation().count,
                        .awaiting_weights = given.awaiting_weights(),
                        .shares_memory = given.shares_memory(),
                        .last_step_applied = given.last_step_applied(),
                        .job_uid = given.job_uid().c_str(),
                        .directions_step = given.directions_step()},
           info);
    return absl::OkStatus();
  });
}

int32_t ballast_trainer_state(const ballast_session* session, void* out, size_t capacity,
                              size_t* bytes) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckGiven(bytes, "bytes"));
    const std::string& state = session->session->trainer_state();
    *bytes = state.size();
    if (out != nullptr) std::memcpy(out, state.data(), std::min(capacity, state.size()));
    return absl::OkStatus();
  });
}

int32_t ballast_upload_weights(ballast_session* session, const float* const* parameters,
                               size_t count) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckFirstWeights(*session, parameters, count));
    return UploadParts(*session, {}, [&](const ballast::ChunkPart& part, size_t plane, float* out) {
      CopyPart(parameters, part, out);
    });
  });
}

int32_t ballast_upload_by(ballast_session* session, uint64_t step, const int64_t* update_counts,
                          size_t count, ballast_values values, void* context) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    ballast::FirstState first = {.step = step};
    if (step > 0) {
      BALLAST_RETURN_IF_ERROR(CheckGiven(update_counts, "update_counts"));
      BALLAST_RETURN_IF_ERROR(CheckCount(*session, count));
      first.update_counts.assign(update_counts, update_counts + count);
    }
    return SendWhatItWrites(values, context, "first weights", [&](AskCaller ask) {
      const ballast::JobSpec& job = session->options.job;
      return UploadParts(*session, first,
                         [&](const ballast::ChunkPart& part, size_t place, float* out) {
                           const int group = job.layout.parameters[part.parameter].group;
                           const ballast::Plane plane =
                               ballast::PlanesOf(job.groups[group].hyper_parameters)[place];
                           ask(part, ballast::proto::ToProto(plane), out);
                         });
    });
  });
}

int32_t ballast_write_state(ballast_session* session, const ballast_state_write* write,
                            ballast_values values, void* context) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckStructure(write, "ballast_state_write"));
    const auto given = CRead(write);
    BALLAST_RETURN_IF_ERROR(CheckGiven(given.parameters, "parameters"));
    if (given.plane_count > 0) BALLAST_RETURN_IF_ERROR(CheckGiven(given.planes, "planes"));
    absl::Duration timeout = absl::Minutes(10);
    BALLAST_RETURN_IF_ERROR(ReadSeconds(given.timeout_seconds, "timeout_seconds", timeout));
    ballast::StateWrite state;
    for (size_t i = 0; i < given.count; ++i) {
      // One that there is not is refused below.
      state.parameters.push_back(
          static_cast<int>(std::min<size_t>(given.parameters[i], ballast::kMaxParameters)));
    }
    for (size_t i = 0; i < given.plane_count; ++i) {
      BALLAST_ASSIGN_OR_RETURN(
          const ballast::Plane plane,
          ballast::proto::FromProto(static_cast<ballast::v1::Plane>(given.planes[i])));
      state.planes.push_back(plane);
    }
    if (given.update_counts != nullptr) {
      state.update_counts.assign(given.update_counts, given.update_counts + given.count);
    }
    const ballast::Layout& layout = session->session->layout();
    return SendWhatItWrites(values, context, "state", [&](AskCaller ask) {
      const auto fill = [&](int chunk, absl::Span<float> out) {
        const size_t elements = layout.chunks()[chunk].elements;
        for (size_t plane = 0; plane < state.planes.size(); ++plane) {
          layout.VisitParts(chunk, [&](const ballast::ChunkPart& part) {
            if (std::ranges::binary_search(state.parameters, part.parameter)) {
              ask(part, given.planes[plane], out.data() + plane * elements + part.chunk_offset);
            }
            return true;
          });
        }
      };
      return session->session->WriteState(state, timeout, fill);
    });
  });
}

int32_t ballast_read_weights(ballast_session* session) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    const absl::Status read = session->session->ReadWeights();
    // Also after an error: when this has returned, no thread writes to the caller's parameters.
    session->copies->Finish();
    return read;
  });
}

int32_t ballast_begin_step(ballast_session* session, const ballast_step* step) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckStructure(step, "ballast_step"));
    BALLAST_ASSIGN_OR_RETURN(const ballast::StepSettings settings,
                             ReadStep(CRead(step), session->options.job.groups));
    BALLAST_RETURN_IF_ERROR(session->session->BeginStep(settings));
    // Only when a step has begun: a call that is refused in the middle of one must not forget what
    // was given of it.
    session->gradients->Reset();
    return absl::OkStatus();
  });
}

int32_t ballast_push_gradients(ballast_session* session, uint32_t micro_step,
                               const void* const* gradients, size_t count, int32_t final) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckGiven(gradients, "gradients"));
    BALLAST_RETURN_IF_ERROR(CheckCount(*session, count));
    BALLAST_ASSIGN_OR_RETURN(const Last last, ReadLast(final));
    return session->gradients->GiveAll(micro_step, gradients, last);
  });
}

int32_t ballast_give_gradient(ballast_session* session, uint32_t micro_step, size_t parameter,
                              const void* gradient, int32_t final) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_ASSIGN_OR_RETURN(const Last last, ReadLast(final));
    return session->gradients->Give(micro_step, parameter, gradient, last);
  });
}

int32_t ballast_gradient_places(ballast_session* session, uint32_t micro_step, size_t parameter,
                                ballast_gradient_place* out, size_t capacity, size_t* count,
                                uint64_t* attempt) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckGiven(count, "count"));
    BALLAST_RETURN_IF_ERROR(CheckGiven(attempt, "attempt"));
    BALLAST_ASSIGN_OR_RETURN(const GradientGiver::PlacesOfGradient places,
                             session->gradients->Places(micro_step, parameter));
    *count = places.places.size();
    *attempt = places.attempt;
    for (size_t i = 0; out != nullptr && i < std::min(capacity, *count); ++i) {
      const GradientPlace& place = places.places[i];
      out[i] = {.data = place.data, .offset = place.offset, .elements = place.elements};
    }
    return absl::OkStatus();
  });
}

void ballast_gradient_written(void* ticket) {
  const auto& given = *static_cast<const ballast_gradient_ticket*>(ticket);
  if (!CheckSession(given.session).ok()) return;
  CCall([&] {
    // An invalid number counts as BALLAST_MORE, because this function returns no status.
    given.session->gradients->Written(given.parameter, given.attempt,
                                      ReadLast(given.final).value_or(Last::kMore));
    return absl::OkStatus();
  });
}

int32_t ballast_end_gradients(ballast_session* session, uint32_t micro_step, int32_t final) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_ASSIGN_OR_RETURN(const Last last, ReadLast(final));
    return session->gradients->End(micro_step, last);
  });
}

int32_t ballast_gradient_memory(ballast_session* session, int32_t chunk, void** data,
                                size_t* bytes) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckGiven(data, "data"));
    BALLAST_RETURN_IF_ERROR(CheckGiven(bytes, "bytes"));
    BALLAST_RETURN_IF_ERROR(FindOwnChunk(*session, chunk).status());
    const absl::Span<std::byte> memory = session->session->gradient_memory(chunk);
    *data = memory.data();
    *bytes = memory.size();
    return absl::OkStatus();
  });
}

int32_t ballast_report_number(ballast_session* session, const char* name, double value) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckGiven(name, "name"));
    return session->session->Report({.numbers = {{name, value}}, .seconds = std::nullopt});
  });
}

int32_t ballast_report_seconds(ballast_session* session, double compute, double reduce, double send,
                               double wait) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    return session->session->Report(
        {.numbers = {},
         .seconds = ballast::RankSeconds{
             .compute = compute, .reduce = reduce, .send = send, .wait = wait}});
  });
}

int32_t ballast_seal(ballast_session* session, uint32_t micro_steps, ballast_norm* norm,
                     double* group_norms, size_t group_count) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckStructure(norm, "ballast_norm"));
    const size_t groups = session->options.job.groups.size();
    if (group_norms != nullptr && group_count != groups) {
      return absl::InvalidArgumentError(
          absl::StrCat("group_count is ", group_count, ", but the job has ", groups, " groups"));
    }
    BALLAST_ASSIGN_OR_RETURN(const ballast::StepNorm told, session->session->Seal(micro_steps));
    CWrite(ballast_norm{.size = 0,
                        .step = told.step,
                        .norm = told.norm,
                        .non_finite = !told.non_finite.empty(),
                        .unused_parameters = told.unused_parameters.size() +
                                             static_cast<uint64_t>(told.more_unused_parameters)},
           norm);
    // A lost step has no norms.
    for (size_t g = 0; group_norms != nullptr && g < groups; ++g) {
      group_norms[g] = g < told.group_norms.size() ? told.group_norms[g] : 0;
    }
    KeepUnused(*session, told.unused_parameters);
    if (!told.non_finite.empty()) Said() = {told.non_finite, ""};
    return absl::OkStatus();
  });
}

int32_t ballast_unused(const ballast_session* session, size_t* out, size_t capacity,
                       size_t* count) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckGiven(count, "count"));
    *count = session->unused.size();
    if (out != nullptr) std::copy_n(session->unused.begin(), std::min(capacity, *count), out);
    return absl::OkStatus();
  });
}

int32_t ballast_vote(ballast_session* session, const ballast_ballot* ballot,
                     ballast_decision* decision) {
  return CDecide(session, ballot, decision,
                 [&](const ballast::StepVote& vote) { return session->session->Vote(vote); });
}

int32_t ballast_seal_and_vote(ballast_session* session, uint32_t micro_steps,
                              const ballast_ballot* ballot, ballast_decision* decision) {
  return CDecide(session, ballot, decision, [&](const ballast::StepVote& vote) {
    return session->session->Seal(micro_steps, vote);
  });
}

int32_t ballast_discard(ballast_session* session) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(session->session->Discard());
    // After the answer: what other threads give until then is of the old attempt, and goes with it.
    session->gradients->Reset();
    return absl::OkStatus();
  });
}

int32_t ballast_read_directions(ballast_session* session, void* const* directions, size_t count,
                                ballast_hyper_parameters* values, int32_t* wanted) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckGiven(wanted, "wanted"));
    BALLAST_RETURN_IF_ERROR(CheckGiven(values, "values"));
    BALLAST_RETURN_IF_ERROR(CheckMatrices(*session, directions, count));
    const ballast::Layout& layout = session->session->layout();
    const auto place = [&](int chunk, absl::Span<const std::byte> direction) {
      layout.VisitParts(chunk, [&](const ballast::ChunkPart& part) {
        std::memcpy(static_cast<std::byte*>(directions[part.parameter]) +
                        part.part_offset * kDirectionBytes,
                    direction.data() + part.chunk_offset * kDirectionBytes,
                    part.elements * kDirectionBytes);
        return true;
      });
    };
    BALLAST_ASSIGN_OR_RETURN(const std::vector<ballast::HyperParameters> read,
                             session->session->ReadDirections(place));
    *wanted = read.empty() ? 0 : 1;
    std::transform(read.begin(), read.end(), values, ballast::client::WriteHyperParameters);
    return absl::OkStatus();
  });
}

int32_t ballast_give_orthogonal(ballast_session* session, const void* const* orthogonal,
                                size_t count) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckMatrices(*session, orthogonal, count));
    const ballast::Layout& layout = session->session->layout();
    return session->session->GiveOrthogonal([&](int chunk, absl::Span<std::byte> out) {
      layout.VisitParts(chunk, [&](const ballast::ChunkPart& part) {
        std::memcpy(out.data() + part.chunk_offset * kDirectionBytes,
                    static_cast<const std::byte*>(orthogonal[part.parameter]) +
                        part.part_offset * kDirectionBytes,
                    part.elements * kDirectionBytes);
        return true;
      });
    });
  });
}

int32_t ballast_receive_weights(ballast_session* session) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    const absl::Status received = session->session->ReceiveWeights();
    // Also after a timeout: this thread helps to copy what has come so far.
    session->copies->Finish();
    return received;
  });
}

int32_t ballast_await_weights(ballast_session* session, const size_t* parameters, size_t count) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckGiven(parameters, "parameters"));
    std::vector<int> chunks;
    for (size_t i = 0; i < count; ++i) {
      if (parameters[i] >= session->chunks_of.size()) {
        return absl::InvalidArgumentError(absl::StrCat("parameter ", parameters[i],
                                                       " does not exist; the job has ",
                                                       session->chunks_of.size(), " parameters"));
      }
      const std::vector<int>& of = session->chunks_of[parameters[i]];
      // A chunk that two of the parameters share is named twice, which disturbs no wait.
      chunks.insert(chunks.end(), of.begin(), of.end());
    }
    BALLAST_RETURN_IF_ERROR(session->session->AwaitWeights(chunks));
    // What has arrived was added before AwaitWeights returned (SessionImpl::on_weights_).
    session->copies->Finish(chunks);
    return absl::OkStatus();
  });
}

int32_t ballast_save(ballast_session* session, const char* directory) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckGiven(directory, "directory"));
    return session->session->SaveCheckpoint(directory);
  });
}

int32_t ballast_load(ballast_session* session, const char* directory) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckGiven(directory, "directory"));
    return session->session->LoadCheckpoint(directory);
  });
}

int32_t ballast_undo(ballast_session* session, uint64_t* undone_step) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_ASSIGN_OR_RETURN(const uint64_t undone, session->session->UndoStep());
    if (undone_step != nullptr) *undone_step = undone;
    return absl::OkStatus();
  });
}

}  // extern "C"
