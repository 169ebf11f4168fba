// A service whose methods take and return bytes. Its constructor names each method's handler:
//
//   Unary("GetJob", pools.control, &JobService::Get);
//   Writes("TraceJob", [this](grpc::CallbackServerContext& context, absl::StatusOr<Caller> caller,
//                             const grpc::ByteBuffer& request) { return new TraceCall(...); });
//
// A parsed request may take a hundred times its bytes. So requests are measured first. They are
// parsed once the caller is known and a thread is free (unary_call.h).
#ifndef BALLAST_SERVER_RAW_SERVICE_H_
#define BALLAST_SERVER_RAW_SERVICE_H_

#include <google/protobuf/descriptor.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/access/access.h"
#include "server/call_pool.h"
#include "server/unary_call.h"

namespace ballast::server {

// `Generated` is a class of gRPC's, such as v1::JobService. Thread-safe. The access and the pools
// outlive its calls. Reactors own themselves. A reactor gets its caller even if that is not
// admitted, because only a reactor can end the call with the reason.
template <typename Generated>
class RawService : public Generated::Service {
 protected:
  using Bytes = grpc::ByteBuffer;

  explicit RawService(const Access& access) : access_(access) {}

  // `work` ends the call, now or later, unless it returns an error. A request of type Bytes is
  // passed unparsed.
  template <typename Self, typename Request>
  void Unary(const char* name, CallPool& pool,
             absl::Status (Self::*work)(UnaryCall&, const Request&)) {
    Handle(name,
           new grpc::internal::CallbackUnaryHandler<Bytes, Bytes>(
               [this, method = AccessName(name), &pool, work](grpc::CallbackServerContext* context,
                                                              const Bytes* request, Bytes* answer) {
                 return UnaryCall::Start<Request>(
                     access_.Admit(*context, method), pool, {context, request, answer},
                     [this, work](UnaryCall& call, const Request& asked) {
                       return (static_cast<Self*>(this)->*work)(call, asked);
                     });
               }));
  }
  // The answer is what `work` returns.
  template <typename Self, typename Request, typename Answer>
  void Unary(const char* name, CallPool& pool,
             absl::StatusOr<Answer> (Self::*work)(const Caller&, const Request&) const) {
    Handle(name,
           new grpc::internal::CallbackUnaryHandler<Bytes, Bytes>(
               [this, method = AccessName(name), &pool, work](grpc::CallbackServerContext* context,
                                                              const Bytes* request, Bytes* answer) {
                 return UnaryCall::Run<Request>(
                     access_.Admit(*context, method), pool, {context, request, answer},
                     [this, work](const Caller& caller, const Request& asked) {
                       return (static_cast<const Self*>(this)->*work)(caller, asked);
                     });
               }));
  }
  // `make(context, caller, ...)` makes the call's reactor. The third argument is the request for
  // Writes and the response for Reads.
  template <typename Make>
  void Writes(const char* name, Make make) {
    Handle(name, new grpc::internal::CallbackServerStreamingHandler<Bytes, Bytes>(
                     [this, method = AccessName(name), make](grpc::CallbackServerContext* context,
                                                             const Bytes* request) {
                       return make(*context, access_.Admit(*context, method), *request);
                     }));
  }
  template <typename Make>
  void Reads(const char* name, Make make) {
    Handle(name, new grpc::internal::CallbackClientStreamingHandler<Bytes, Bytes>(
                     [this, method = AccessName(name), make](grpc::CallbackServerContext* context,
                                                             Bytes* response) {
                       return make(*context, access_.Admit(*context, method), *response);
                     }));
  }
  template <typename Make>
  void Bidi(const char* name, Make make) {
    Handle(name, new grpc::internal::CallbackBidiHandler<Bytes, Bytes>(
                     [this, method = AccessName(name), make](grpc::CallbackServerContext* context) {
                       return make(*context, access_.Admit(*context, method));
                     }));
  }

 private:
  static const google::protobuf::ServiceDescriptor& Description() {
    return *google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(
        Generated::service_full_name());
  }
  // As method_rules.h names it.
  static std::string AccessName(const char* method) {
    return absl::StrCat(Description().name(), ".", method);
  }
  // Does what generated code does for a method that takes bytes. Methods are numbered as in the
  // file.
  void Handle(const char* method, grpc::internal::MethodHandler* handler) {
    this->MarkMethodRawCallback(Description().FindMethodByName(method)->index(), handler);
  }

  const Access& access_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_RAW_SERVICE_H_
