#include "server/reflection.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <grpcpp/server_context.h>

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/memory_guard.h"
#include "proto/frame.h"
#include "server/call_guard.h"

namespace ballast::server {
namespace {

namespace v1alpha = grpc::reflection::v1alpha;
using ::google::protobuf::DescriptorPool;

// What this program may serve.
constexpr const char* kFiles[] = {"ballast/v1/ballast.proto", "ballast/v1/diagnostics.proto",
                                  "grpc/reflection/v1alpha/reflection.proto"};
constexpr char kHealth[] = "grpc.health.v1.Health";  // gRPC's, without a file.

void AddServices(v1alpha::ListServiceResponse& response) {
  for (const char* name : kFiles) {
    const google::protobuf::FileDescriptor* const file =
        DescriptorPool::generated_pool()->FindFileByName(name);
    for (int i = 0; file != nullptr && i < file->service_count(); ++i) {
      response.add_service()->set_name(file->service(i)->full_name());
    }
  }
  response.add_service()->set_name(kHealth);
}

// With those that it imports.
void AddFile(const google::protobuf::FileDescriptor& file, std::set<std::string>& added,
             v1alpha::FileDescriptorResponse& response) {
  if (!added.insert(file.name()).second) return;
  google::protobuf::FileDescriptorProto message;
  file.CopyTo(&message);
  response.add_file_descriptor_proto(message.SerializeAsString());
  for (int i = 0; i < file.dependency_count(); ++i) AddFile(*file.dependency(i), added, response);
}

v1alpha::ServerReflectionResponse Answer(const v1alpha::ServerReflectionRequest& request) {
  v1alpha::ServerReflectionResponse response;
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  if (request.message_request_case() == v1alpha::ServerReflectionRequest::kListServices) {
    AddServices(*response.mutable_list_services_response());
    return response;
  }
  // Any other kind, such as one about extensions, of which these files have none, asks here for the
  // symbol "", which there is not.
  const DescriptorPool& pool = *DescriptorPool::generated_pool();
  const google::protobuf::FileDescriptor* const file =
      request.message_request_case() == v1alpha::ServerReflectionRequest::kFileByFilename
          ? pool.FindFileByName(request.file_by_filename())
          : pool.FindFileContainingSymbol(request.file_containing_symbol());
  if (file != nullptr) {
    std::set<std::string> added;
    AddFile(*file, added, *response.mutable_file_descriptor_response());
    return response;
  }
  v1alpha::ErrorResponse& error = *response.mutable_error_response();
  error.set_error_code(static_cast<int>(grpc::StatusCode::NOT_FOUND));
  error.set_error_message("there is no such file, symbol or extension; ask for list_services");
  return response;
}

// Owns itself: gRPC calls OnDone last, which deletes it. One message is read, answered and sent
// after the other.
class Stream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  Stream(CallPools& pools, grpc::CallbackServerContext& context)
      : pool_(pools.reflection),
        watched_(
            pool_.watch().Watch([this, &context] { GiveUp(context); }, WatchedCall::kOpenSeconds)) {
    absl::StatusOr<CallPool::Place> place = pool_.Enter();
    if (!place.ok()) {
      Finish(EndOf(place.status()));
      return;
    }
    place_ = *std::move(place);
    Read();
  }

  void OnReadDone(bool ok) override {
    // Whoever clears it, this or the watch, says what becomes of the stream, which can be finished
    // only once.
    if (!reading_.exchange(false)) return;  // The watch has ended it.
    watched_->PeerActed();
    if (!ok) return Finish(grpc::Status::OK);
    // Descriptors are copied and serialized for an answer: not on a thread of gRPC's.
    const absl::Status queued = GuardedRun([this] { pool_.Run([this] { Work(); }); });
    if (!queued.ok()) Finish(EndOf(queued));
  }
  void OnWriteDone(bool ok) override {
    watched_->PeerActed();
    ok ? Read() : Finish(EndOf(GoneError("reader")));
  }
  void OnDone() override {
    // First: a look may be in GiveUp, and this waits for its end.
    watched_->Ended();
    delete this;
  }

 private:
  void Read() {
    // All of it before the read begins: the message may be there before StartRead has returned.
    reading_ = true;
    watched_->PeerMustAct();
    StartRead(&bytes_);
  }

  void Work() {
    const absl::Status answered = Guarded([this]() -> absl::Status {
      BALLAST_ASSIGN_OR_RETURN(const auto request,
                               proto::ParseRequest<v1alpha::ServerReflectionRequest>(bytes_));
      bytes_ = proto::SerializeControl(Answer(request));
      return absl::OkStatus();
    });
    if (!answered.ok()) return Finish(EndOf(answered));
    watched_->PeerMustAct();
    StartWrite(&bytes_);
  }

  // For the watch: ends what asks nothing, and cancels what takes no answer.
  void GiveUp(grpc::CallbackServerContext& context) {
    // Before the stream is this one's to end: were there no memory for the text after that, nobody
    // would end it.
    const absl::Status why = OrOutOfMemory([] {
      return absl::DeadlineExceededError(
          absl::StrCat("no request arrived within ", WatchedCall::kOpenSeconds,
                       " seconds; open another stream when there is one"));
    });
    // While a read is under way there is no write, so the stream can end with its reason. A write
    // that hangs can only be cancelled.
    if (!reading_.exchange(false)) return context.TryCancel();
    Finish(EndOf(why));
  }

  CallPool& pool_;
  const std::shared_ptr<WatchedCall> watched_;
  CallPool::Place place_;
  std::atomic<bool> reading_ = false;
  grpc::ByteBuffer bytes_;  // The request, then the answer.
};

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Reflection::ServerReflectionInfo(
    grpc::CallbackServerContext* context) {
  return MakeReactor<grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>>(
      [&] { return new Stream(pools_, *context); });
}

}  // namespace ballast::server
