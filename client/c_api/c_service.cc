// The functions of client/ballast.h that call a service beside a session.
#include <grpc/support/log.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ballast/v1/state.pb.h"
#include "client/ballast.h"
#include "client/c_api/c_call.h"
#include "client/c_api/c_options.h"
#include "client/c_api/c_session.h"
#include "client/c_api/self_signed.h"
#include "client/calls/cluster_services.h"
#include "client/calls/service.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"

namespace ballast::client {
namespace {

// gRPC's threads do not exist in a fork, and what they wait with is shared with the parent, whom
// calls from there would disturb.
absl::Status CheckMayCall() {
  static std::atomic<pid_t> first_process = 0;
  pid_t first = 0;
  // The first call stores its process. In every later one the exchange fails, and puts the stored
  // number, which a fork inherits, into `first`.
  if (first_process.compare_exchange_strong(first, getpid()) || first == getpid()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      "this process is a fork of one that has called a service, and cannot call any; start it by "
      "spawn or exec");
}

// Errors are said once, by ballast_message. A user who asks gRPC for its own lines gets them.
void SilenceTransport() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (std::getenv("GRPC_VERBOSITY") == nullptr) gpr_set_log_function([](gpr_log_func_args*) {});
  });
}

// A plane's elements in order, to where the caller wants them.
class PlaneReader {
 public:
  PlaneReader(float* out, int64_t elements) : out_(out), elements_(elements) {}

  // Each attempt begins anew, because the job may be at another step by then.
  void Begin() { next_ = -1; }
  absl::Status Take(const v1::ReadStateResponse& part) {
    if (next_ < 0) BALLAST_RETURN_IF_ERROR(TakeFirst(part));
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
    if (next_ == elements_) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat("the service sent ", std::max<int64_t>(0, next_),
                                            " of ", elements_, " elements"));
  }
  uint64_t step() const { return step_; }
  int64_t update_count() const { return update_count_; }

 private:
  // Only the first part has these.
  absl::Status TakeFirst(const v1::ReadStateResponse& part) {
    next_ = 0;
    step_ = part.step();
    update_count_ = part.update_count();
    const int64_t all = std::accumulate(part.shape().begin(), part.shape().end(), int64_t{1},
                                        std::multiplies<int64_t>());
    if (all == elements_) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("out has room for ", elements_, " elements, but the parameter has ", all));
  }

  float* const out_;
  const int64_t elements_;
  int64_t next_ = -1;
  uint64_t step_ = 0;
  int64_t update_count_ = 0;
};

absl::Status WithService(const ballast_options* options,
                         absl::FunctionRef<absl::Status(Service&)> call) {
  BALLAST_RETURN_IF_ERROR(CheckStructure(options, "ballast_options"));
  const ballast_options given = CRead(options);
  BALLAST_RETURN_IF_ERROR(CheckGiven(given.service, "ballast_options.service"));
  absl::Duration timeout = absl::Minutes(10);
  absl::Duration wait = absl::Minutes(1);
  BALLAST_RETURN_IF_ERROR(ReadSeconds(given.wait_seconds, "wait_seconds", timeout));
  BALLAST_RETURN_IF_ERROR(
      ReadSeconds(given.reconnect_timeout_seconds, "reconnect_timeout_seconds", wait));
  BALLAST_RETURN_IF_ERROR(BeginTransport());
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<Service> service,
                           Service::To(given.service, ReadCredentials(given), timeout, wait));
  return call(*service);
}

}  // namespace

absl::Status BeginTransport() {
  BALLAST_RETURN_IF_ERROR(CheckMayCall());
  SilenceTransport();
  return absl::OkStatus();
}

}  // namespace ballast::client

using namespace ballast;  // The functions below are all that this file exports.
using namespace ballast::client;

extern "C" {

int32_t ballast_call(const ballast_options* options, const char* method, const char* request,
                     const char** response) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckGiven(method, "method"));
    BALLAST_RETURN_IF_ERROR(CheckGiven(request, "request"));
    BALLAST_RETURN_IF_ERROR(CheckGiven(response, "response"));
    return WithService(options, [&](Service& service) -> absl::Status {
      thread_local std::string answer;
      BALLAST_ASSIGN_OR_RETURN(answer, service.CallJson(method, request));
      *response = answer.c_str();
      return absl::OkStatus();
    });
  });
}

int32_t ballast_read_state(const ballast_options* options, const char* parameter, int32_t plane,
                           float* out, int64_t elements, uint64_t* step, int64_t* update_count) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckGiven(parameter, "parameter"));
    BALLAST_RETURN_IF_ERROR(CheckGiven(step, "step"));
    BALLAST_RETURN_IF_ERROR(CheckGiven(update_count, "update_count"));
    if (elements > 0) BALLAST_RETURN_IF_ERROR(CheckGiven(out, "out"));
    if (plane < BALLAST_MASTER || plane > BALLAST_SUM) {
      return absl::InvalidArgumentError(
          absl::StrCat("plane is ", plane, "; expected a ballast_plane"));
    }
    return WithService(options, [&](Service& service) -> absl::Status {
      v1::ReadStateRequest request;
      request.set_name(parameter);
      request.set_plane(static_cast<v1::Plane>(plane));
      PlaneReader reader(out, elements);
      BALLAST_RETURN_IF_ERROR(service.ReadState(
          request, [&] { reader.Begin(); },
          [&](const v1::ReadStateResponse& part) { return reader.Take(part); }));
      BALLAST_RETURN_IF_ERROR(reader.Finish());
      *step = reader.step();
      *update_count = reader.update_count();
      return absl::OkStatus();
    });
  });
}

int32_t ballast_find_services(const ballast_options* options, const char** services) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckStructure(options, "ballast_options"));
    BALLAST_RETURN_IF_ERROR(CheckGiven(services, "services"));
    const ballast_options given = CRead(options);
    BALLAST_RETURN_IF_ERROR(CheckGiven(given.service, "ballast_options.service"));
    BALLAST_ASSIGN_OR_RETURN(const SessionOptions read, ReadOptions(given));
    BALLAST_RETURN_IF_ERROR(BeginTransport());
    thread_local std::string found;
    BALLAST_ASSIGN_OR_RETURN(found, FindServices(given.service, read.job, ReadCredentials(given)));
    *services = found.c_str();
    return absl::OkStatus();
  });
}

int32_t ballast_make_identity(const char* host, const char** certificate, const char** key) {
  return CCall([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(CheckGiven(host, "host"));
    BALLAST_RETURN_IF_ERROR(CheckGiven(certificate, "certificate"));
    BALLAST_RETURN_IF_ERROR(CheckGiven(key, "key"));
    thread_local Identity made;
    BALLAST_ASSIGN_OR_RETURN(made, MakeIdentity(host));
    *certificate = made.certificate.c_str();
    *key = made.key.c_str();
    return absl::OkStatus();
  });
}

}  // extern "C"
