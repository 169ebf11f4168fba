// A service, and what it must do with a request that it refuses.
#ifndef BALLAST_TESTS_SERVER_JOBS_MALFORMED_INPUT_H_
#define BALLAST_TESTS_SERVER_JOBS_MALFORMED_INPUT_H_

#include <gmock/gmock.h>

#include <string>

#include "google/rpc/status.pb.h"
#include "tests/server/tiny_job.h"

namespace ballast::server {

class MalformedInput : public testing::Test {
 protected:
  // Every error carries its reason; and the service still answers.
  void ExpectRefused(const grpc::Status& status, grpc::StatusCode code, const std::string& what) {
    EXPECT_EQ(status.error_code(), code) << what << ": " << status.error_message();
    EXPECT_THAT(status.error_message(),
                testing::AllOf(testing::Not(""), testing::Not(testing::HasSubstr("\n"))))
        << what;
    google::rpc::Status details;
    EXPECT_TRUE(details.ParseFromString(status.error_details())) << what;
    ASSERT_EQ(details.details_size(), 1) << what;
    google::rpc::ErrorInfo info;
    EXPECT_TRUE(details.details(0).UnpackTo(&info)) << what;
    EXPECT_EQ(info.domain(), "ballast") << what;
    EXPECT_NE(info.reason(), "") << what;
    ExpectAnswers(what);
  }

  void ExpectAnswers(const std::string& what) {
    grpc::ClientContext context;
    v1::ListJobsResponse response;
    const grpc::Status status = service_.jobs().ListJobs(&context, {}, &response);
    ASSERT_TRUE(status.ok()) << what << ": " << status.error_message();
  }

  grpc::Status Create(const v1::Job& job) {
    grpc::ClientContext context;
    v1::CreateJobRequest request;
    *request.mutable_job() = job;
    v1::Job response;
    return service_.jobs().CreateJob(&context, request, &response);
  }

  ServiceForTests service_;
};

}  // namespace ballast::server

#endif  // BALLAST_TESTS_SERVER_JOBS_MALFORMED_INPUT_H_
