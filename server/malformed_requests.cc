#include "server/malformed_requests.h"

#include <google/protobuf/descriptor.h>
#include <grpcpp/support/server_interceptor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/reason.h"
#include "proto/status.h"

namespace ballast::server {
namespace {

using grpc::experimental::InterceptionHookPoints;

// Of "/ballast.v1.JobService/GetJob".
const google::protobuf::MethodDescriptor* FindMethod(const char* path) {
  const std::string name =
      absl::StrReplaceAll(absl::StripPrefix(path == nullptr ? "" : path, "/"), {{"/", "."}});
  return google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(name);
}

// Of one call.
class Explainer final : public grpc::experimental::Interceptor {
 public:
  explicit Explainer(std::string request) : request_(std::move(request)) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_MESSAGE)) {
      malformed_ = methods->GetRecvMessage() == nullptr;
    }
    if (malformed_ &&
        methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      methods->ModifySendStatus(proto::ToGrpc(
          WithReason(absl::InvalidArgumentError(absl::StrCat("the request is not a ", request_)),
                     reason::kMalformedMessage)));
    }
    methods->Proceed();
  }

 private:
  const std::string request_;
  bool malformed_ = false;
};

class ExplainerFactory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    const google::protobuf::MethodDescriptor* const method = FindMethod(info->method());
    // Streams of requests are left alone: each of their messages would come by here.
    if (method == nullptr || method->client_streaming()) return nullptr;
    return new Explainer(method->input_type()->full_name());
  }
};

}  // namespace

void ExplainMalformedRequests(grpc::ServerBuilder& builder) {
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> factories;
  factories.push_back(std::make_unique<ExplainerFactory>());
  builder.experimental().SetInterceptorCreators(std::move(factories));
}

}  // namespace ballast::server
