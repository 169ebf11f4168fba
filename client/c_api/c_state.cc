// The functions of client/ballast.h that look at a job's state.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <numeric>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "ballast/v1/ballast.grpc.pb.h"
#include "client/ballast.h"
#include "client/c_api/c_call.h"
#include "client/c_api/c_session.h"
#include "client/session/retry.h"
#include "client/transport/clock.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/deadline.h"
#include "proto/status.h"

namespace ballast::client {
namespace {

// A plane's elements in order, to where the caller wants them.
class PlaneReader {
 public:
  PlaneReader(float* out, int64_t elements) : out_(out), elements_(elements) {}

  absl::Status Take(const v1::ReadStateResponse& part) {
    // Only the first part has these.
    if (!begun_) {
      begun_ = true;
      step_ = part.step();
      update_count_ = part.update_count();
    }
    const auto size = static_cast<int64_t>(part.data().size() / sizeof(float));
    // Before the caller's memory is written: offset and size are what the service says.
    if (part.offset() != next_ || size > elements_ - next_) {
      return absl::DataLossError(absl::StrCat("the service sent elements [", part.offset(), ", ",
                                              part.offset() + size, ") of ", elements_,
                                              ", expected from ", next_, " on"));
    }
    if (size > 0) std::memcpy(out_ + next_, part.data().data(), size * sizeof(float));
    next_ += size;
    return absl::OkStatus();
  }
  absl::Status Finish() const {
    if (begun_ && next_ == elements_) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat("the service sent ", next_, " of ", elements_, " elements"));
  }
  uint64_t step() const { return step_; }
  int64_t update_count() const { return update_count_; }

 private:
  float* const out_;
  const int64_t elements_;
  int64_t next_ = 0;
  bool begun_ = false;
  uint64_t step_ = 0;
  int64_t update_count_ = 0;
};

absl::Status ReadPlane(const ballast_session& session, const std::string& parameter, int32_t plane,
                       PlaneReader& reader) {
  BALLAST_ASSIGN_OR_RETURN(const auto channel,
                           session.connection->Connected(session.options.reconnect_timeout));
  const auto stub = v1::StateService::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(proto::Deadline(session.options.reconnect_timeout));
  v1::ReadStateRequest request;
  request.set_name(proto::ParameterName(session.options.job.name, parameter));
  request.set_plane(static_cast<v1::Plane>(plane));
  const auto stream = stub->ReadState(&context, request);
  v1::ReadStateResponse part;
  while (stream->Read(&part)) {
    if (absl::Status status = reader.Take(part); !status.ok()) {
      // Otherwise Finish would wait for the end of a stream that nobody reads.
      context.TryCancel();
      stream->Finish().ok();
      return status;
    }
  }
  BALLAST_RETURN_IF_ERROR(proto::FromGrpc(stream->Finish()));
  return reader.Finish();
}

// A look at the state may be taken again: a service whose process dies meanwhile is soon back.
absl::Status WhileItMayHeal(const ballast_session& session,
                            const std::function<absl::Status()>& call) {
  return Retry(Clock::Real(), session.options.reconnect_timeout, call);
}

absl::Status CheckParameter(const ballast_session& session, size_t parameter) {
  const size_t parameters = session.options.job.layout.parameters.size();
  if (parameter < parameters) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("parameter ", parameter, " of ", parameters, " does not exist"));
}

absl::StatusOr<v1::StateSummary> Summarize(const ballast_session& session, size_t parameter) {
  BALLAST_ASSIGN_OR_RETURN(const auto channel,
                           session.connection->Connected(session.options.reconnect_timeout));
  const auto stub = v1::StateService::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(proto::Deadline(session.options.reconnect_timeout));
  const JobSpec& job = session.options.job;
  v1::SummarizeStateRequest request;
  request.set_name(proto::ParameterName(job.name, job.layout.parameters[parameter].name));
  v1::StateSummary summary;
  BALLAST_RETURN_IF_ERROR(proto::FromGrpc(stub->SummarizeState(&context, request, &summary)));
  return summary;
}

ballast_summary ToC(const v1::PlaneSummary& plane) {
  ballast_summary summary = {.plane = plane.plane(),
                             .norm = plane.norm(),
                             .mean = plane.mean(),
                             .min = plane.min(),
                             .max = plane.max(),
                             .zeros = plane.zeros(),
                             .non_finite = plane.non_finite()};
  const auto& counts = plane.magnitude_histogram();
  std::copy_n(counts.begin(), std::min<size_t>(counts.size(), std::size(summary.magnitudes)),
              summary.magnitudes);
  return summary;
}

}  // namespace
}  // namespace ballast::client

using namespace ballast::client;  // The functions below are all that this file exports.

extern "C" {

int32_t ballast_read_state(const ballast_session* session, size_t parameter, int32_t plane,
                           float* out, int64_t elements, uint64_t* step, int64_t* update_count) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckGiven(step, "step"));
    BALLAST_RETURN_IF_ERROR(CheckGiven(update_count, "update_count"));
    BALLAST_RETURN_IF_ERROR(CheckParameter(*session, parameter));
    const auto& parameters = session->options.job.layout.parameters;
    if (plane < BALLAST_MASTER || plane > BALLAST_MAX_EXP_AVG_SQ) {
      return absl::InvalidArgumentError(
          absl::StrCat("plane is ", plane, ", which is no ballast_plane"));
    }
    const auto& shape = parameters[parameter].shape;
    // It cannot overflow: the session was opened with this shape, whose elements are bounded.
    const int64_t all =
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
    if (elements != all) {
      return absl::InvalidArgumentError(
          absl::StrCat("there is room for ", elements, " elements of parameter ",
                       parameters[parameter].name, ", which has ", all));
    }
    if (all > 0) BALLAST_RETURN_IF_ERROR(CheckGiven(out, "out"));
    return WhileItMayHeal(*session, [&]() -> absl::Status {
      // Each attempt begins anew, because the job may be at another step by then.
      PlaneReader reader(out, all);
      BALLAST_RETURN_IF_ERROR(ReadPlane(*session, parameters[parameter].name, plane, reader));
      *step = reader.step();
      *update_count = reader.update_count();
      return absl::OkStatus();
    });
  });
}

int32_t ballast_summarise(const ballast_session* session, size_t parameter, ballast_summary* out,
                          size_t capacity, size_t* count, uint64_t* step, int64_t* update_count) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckSession(session));
    BALLAST_RETURN_IF_ERROR(CheckGiven(count, "count"));
    BALLAST_RETURN_IF_ERROR(CheckGiven(step, "step"));
    BALLAST_RETURN_IF_ERROR(CheckGiven(update_count, "update_count"));
    if (capacity > 0) BALLAST_RETURN_IF_ERROR(CheckStructure(out, "ballast_summary"));
    BALLAST_RETURN_IF_ERROR(CheckParameter(*session, parameter));
    absl::StatusOr<ballast::v1::StateSummary> answer;
    BALLAST_RETURN_IF_ERROR(WhileItMayHeal(*session, [&] {
      answer = Summarize(*session, parameter);
      return answer.status();
    }));
    const ballast::v1::StateSummary& summary = *answer;
    *count = summary.planes_size();
    for (size_t i = 0; i < std::min(capacity, *count); ++i) {
      CWriteAt(ToC(summary.planes(static_cast<int>(i))), out, i);
    }
    *step = summary.step();
    *update_count = summary.update_count();
    return absl::OkStatus();
  });
}

}  // extern "C"
