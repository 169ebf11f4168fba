#include "server/reflection.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>

#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "proto/frame.h"
#include "proto/status.h"
#include "server/call_errors.h"

namespace ballast::server {
namespace {

namespace v1alpha = grpc::reflection::v1alpha;
using ::google::protobuf::DescriptorPool;

// What this program may serve.
constexpr const char* kFiles[] = {"ballast/v1/jobs.proto", "ballast/v1/train.proto",
                                  "ballast/v1/state.proto", "ballast/v1/diagnostics.proto",
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
  explicit Stream(CallPool& pool) : pool_(pool) {
    absl::StatusOr<CallPool::Place> place = pool_.Enter();
    if (!place.ok()) {
      Finish(proto::ToGrpc(place.status()));
      return;
    }
    place_ = *std::move(place);
    StartRead(&bytes_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    // Descriptors are copied and serialized for an answer: not on a thread of gRPC's.
    pool_.Run([this] { Work(); });
  }
  void OnWriteDone(bool ok) override {
    ok ? StartRead(&bytes_) : Finish(proto::ToGrpc(GoneError("reader")));
  }
  void OnDone() override { delete this; }

 private:
  void Work() {
    const auto request = proto::ParseRequest<v1alpha::ServerReflectionRequest>(bytes_);
    if (!request.ok()) return Finish(proto::ToGrpc(request.status()));
    bytes_ = proto::SerializeControl(Answer(*request));
    StartWrite(&bytes_);
  }

  CallPool& pool_;
  CallPool::Place place_;
  grpc::ByteBuffer bytes_;  // The request, then the answer.
};

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Reflection::ServerReflectionInfo(
    grpc::CallbackServerContext*) {
  return new Stream(pools_.reflection);
}

}  // namespace ballast::server
